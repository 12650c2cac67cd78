//! Parses a job's walltime as people write it: as both schedulers do, or as all other durations of
//! Hostler.

use std::time::Duration;

const FORMS: &str = "write hours, minutes and seconds such as 2:00:00, or units such as 2h";

/// Reads `2:00:00`, `2h`, `1h 30m`.
///
/// # Errors
/// The error says what to write. `2:00` is an error: to the schedulers it is two minutes, to most
/// people two hours.
pub(super) fn parse_walltime(text: &str) -> Result<Duration, String> {
    let parts: Vec<&str> = text.trim().split(':').collect();
    match parts[..] {
        [only] => humantime::parse_duration(only).map_err(|_| FORMS.to_owned()),
        [hours, minutes, seconds] => {
            let number = |part: &str, limit: u64| {
                let digits = part.bytes().all(|byte| byte.is_ascii_digit());
                part.parse::<u64>().ok().filter(|number| digits && *number < limit).ok_or_else(|| FORMS.to_owned())
            };
            // More hours than any queue has, and no overflow.
            let (hours, minutes, seconds) = (number(hours, 1_000_000)?, number(minutes, 60)?, number(seconds, 60)?);
            Ok(Duration::from_secs(hours * 3600 + minutes * 60 + seconds))
        }
        _ => Err(FORMS.to_owned()),
    }
}

#[cfg(test)]
mod tests;
