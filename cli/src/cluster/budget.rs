//! Parses the limits of an entry's budget. Pure, but for the clock and time zone of this host.

use std::time::{Duration, SystemTime};

use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan, Zoned};

/// Most node-hours: a thousand nodes for a year.
const MAX_NODE_HOURS: f64 = 1000.0 * 24.0 * 366.0;

/// A moment such as `18:00`, the next one, `2026-11-30 06:00`, both by this host's time zone, or
/// `90m` from now.
pub(super) fn parse_until(text: &str) -> Result<SystemTime, String> {
    read_until(text, &Zoned::now()).map(SystemTime::from)
}

fn read_until(text: &str, now: &Zoned) -> Result<Timestamp, String> {
    let expected = || format!("{text:?} is no time that is to come: 18:00, `2026-11-30 06:00` or 90m are some");
    let of_zone = |at: DateTime, zone: &TimeZone| zone.to_zoned(at).map(|at| at.timestamp()).map_err(|_| expected());
    let text = text.trim();
    let until = if let Ok(time) = text.parse::<Time>()
        && text.contains(':')
        && !text.contains('-')
    {
        let today = of_zone(now.date().to_datetime(time), now.time_zone())?;
        if today > now.timestamp() { today } else { of_zone((now.date() + 1.day()).to_datetime(time), now.time_zone())? }
    } else if let Ok(at) = text.parse::<Timestamp>() {
        at
    } else if let Ok(at) = text.parse::<DateTime>() {
        of_zone(at, now.time_zone())?
    } else {
        let left = humantime::parse_duration(text).map_err(|_| expected())?;
        now.timestamp().checked_add(left).map_err(|_| expected())?
    };
    if until > now.timestamp() { Ok(until) } else { Err(expected()) }
}

/// Node-hours, as the time of one node.
pub(super) fn parse_node_hours(text: &str) -> Result<Duration, String> {
    let hours = text.trim().parse::<f64>().ok().filter(|hours| *hours > 0.0 && *hours <= MAX_NODE_HOURS);
    hours.map(|hours| Duration::from_secs_f64(hours * 3600.0)).ok_or_else(|| "a number of node-hours above 0 was expected".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_day_is_the_next_one_and_a_date_is_that_one() {
        let now: Zoned = "2026-11-29T17:00:00+01:00[Europe/Berlin]".parse().unwrap();
        let until = |text: &str| read_until(text, &now).map(|at| at.to_string());
        for (text, at) in [
            ("18:00", "2026-11-29T17:00:00Z"),
            ("06:30", "2026-11-30T05:30:00Z"),
            ("2026-11-30 06:00", "2026-11-30T05:00:00Z"),
            ("2026-11-30T06:00:00Z", "2026-11-30T06:00:00Z"),
            ("90m", "2026-11-29T17:30:00Z"),
            ("2d", "2026-12-01T16:00:00Z"),
        ] {
            assert_eq!(until(text).as_deref(), Ok(at), "{text}");
        }
        for wrong in ["", "soon", "25:00", "2026-11-28 06:00", "0s", "18"] {
            assert!(until(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn node_hours_are_a_number_above_zero() {
        assert_eq!(parse_node_hours("0.5"), Ok(Duration::from_secs(1800)));
        for wrong in ["0", "-1", "nan", "inf", "1e99", "20h"] {
            assert!(parse_node_hours(wrong).is_err(), "{wrong}");
        }
    }
}
