//! Arithmetic with sizes in bytes, and their format for people.

pub(crate) const GIB: u64 = 1 << 30;

/// Multiplies `count` by `factor`, rounded. Exact to one in 2^53, which no size here reaches.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes are far below 2^53 and positive"
)]
pub(crate) fn scaled(count: u64, factor: f64) -> u64 {
    (count as f64 * factor).round() as u64
}

/// Formats bytes as GiB with one digit after the point, rounded half up, or as MiB if small.
pub(crate) fn format_gib(bytes: u64) -> String {
    if (1..GIB / 10).contains(&bytes) {
        return format!("{} MiB", bytes >> 20);
    }
    let tenths = (u128::from(bytes) * 10 + u128::from(GIB) / 2) / u128::from(GIB);
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

/// Bytes of a size such as `64GiB` or `2TiB`; `None` if it is no such size, or none at all.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = match (text.strip_suffix("GiB"), text.strip_suffix("TiB")) {
        (Some(number), _) => (number, GIB),
        (_, number) => (number?, 1024 * GIB),
    };
    number.trim().parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}
