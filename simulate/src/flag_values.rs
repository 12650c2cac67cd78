//! Numbers that flags may have. Every accepted value lets a run end.

use std::str::FromStr;

/// Parses a number above zero.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0, "a number above zero is needed")
}

/// Parses a number from zero up.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0, "a number from zero up is needed")
}

/// Parses zero, or at least a second: otherwise a run would consist of ends.
pub(crate) fn zero_or_seconds(text: &str) -> Result<f64, String> {
    number(text, |number| number == 0.0 || number >= 1.0, "zero, or a second or more is needed")
}

/// Parses a number from zero to one.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a share from 0 to 1 is needed")
}

fn number(text: &str, is_good: fn(f64) -> bool, needed: &str) -> Result<f64, String> {
    let number = f64::from_str(text).map_err(|error| error.to_string())?;
    if number.is_finite() && is_good(number) { Ok(number) } else { Err(needed.to_owned()) }
}
