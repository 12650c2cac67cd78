//! Formats figures in as few columns as are readable.

use std::time::SystemTime;

use hostler_proto::agent::v1::EngineLoad;

use crate::ps::{GpuTotal, gib};

/// Stands for an unknown figure.
pub(super) const UNKNOWN: &str = "-";

/// `61%` for 0.61.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// `7.5`, `123`, `12.3k`.
pub(super) fn rate(number: f64) -> String {
    match number {
        _ if number <= 0.0 => "0".to_owned(),
        _ if number < 10.0 => format!("{number:.1}"),
        _ if number < 10_000.0 => format!("{number:.0}"),
        _ => format!("{:.1}k", number / 1000.0),
    }
}

/// `85ms`, `1.2s`, `140s`.
pub(super) fn seconds(time: f64) -> String {
    match time {
        _ if time < 1.0 => format!("{:.0}ms", time * 1000.0),
        _ if time < 100.0 => format!("{time:.1}s"),
        _ => format!("{time:.0}s"),
    }
}

#[allow(clippy::cast_precision_loss, reason = "a share that people read")]
pub(super) fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Share of the looked-up tokens that the prefix cache had, since the engine began.
pub(super) fn hit_share(engine: EngineLoad) -> Option<f64> {
    share(engine.prefix_hits, engine.prefix_queries)
}

/// `13:24:05`, in UTC.
pub(super) fn clock(at: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(at).to_string();
    text.get(11..19).unwrap_or_default().to_owned()
}

/// `98/141G`, to the nearest GiB; `-/141G` for GPUs that do not report used memory.
pub(super) fn memory(gpus: &GpuTotal) -> String {
    let used = gpus.memory_used.map_or_else(|| UNKNOWN.to_owned(), |used| gib(used).to_string());
    format!("{used}/{}G", gib(gpus.memory))
}

/// Utilisation, memory, temperature and power, as far as known.
pub(super) fn gpu_figures(gpus: &GpuTotal) -> [String; 4] {
    [
        gpus.utilisation.map(|percents| format!("{percents}%")).unwrap_or_default(),
        memory(gpus),
        gpus.celsius.map(|celsius| format!("{celsius}°C")).unwrap_or_default(),
        gpus.watts.map(|watts| format!("{watts:.0}W")).unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_at_every_size() {
        assert_eq!([0.0, 0.04, 7.46, 999.6, 12_345.0].map(rate), ["0", "0.0", "7.5", "1000", "12.3k"]);
        assert_eq!([0.0004, 0.0854, 1.23, 140.4].map(seconds), ["0ms", "85ms", "1.2s", "140s"]);
        assert_eq!((percent(0.614), share(1, 0)), ("61%".to_owned(), None));
        assert_eq!(clock(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(3600 * 13 + 65)), "13:01:05");
    }
}
