//! The words of serde's errors, as people say them who do not know Rust.

use super::cut;

/// A value that has not the type of its setting: `usize` is a whole number.
pub(super) fn of_type_error(message: &str) -> String {
    let message = message.trim().replace('\n', " ");
    let described = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    if let Some((found, expected)) = described.and_then(|rest| rest.rsplit_once(", expected ")) {
        return format!("{} was expected, not {}", expectation(expected), value(found));
    }
    if let Some((found, expected)) = message.strip_prefix("unknown variant ").and_then(|rest| rest.rsplit_once(", expected ")) {
        let choices = expected.strip_prefix("one of ").unwrap_or(expected).replace('`', "").replace(" or ", ", ");
        return format!("one of {choices} was expected, not {}", value(found));
    }
    message
}

fn expectation(expected: &str) -> &str {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number from 0 on",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" => "a text in quotes",
        "a sequence" => "a list in brackets",
        "a nonzero u8" | "a nonzero u16" | "a nonzero u32" | "a nonzero u64" | "a nonzero usize" => "a whole number from 1 on",
        expected => expected,
    }
}

/// The found value, as the file has it.
fn value(found: &str) -> String {
    let kinds = ["string ", "integer ", "floating point ", "boolean ", "character "];
    let bare = kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found);
    match bare {
        "sequence" => "a list".to_owned(),
        "map" => "a table".to_owned(),
        bare => cut(bare.trim_matches('`')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_has_a_type_of_rust() {
        for (message, words) in [
            ("invalid type: string \"many\", expected usize", "a whole number from 0 on was expected, not \"many\""),
            ("invalid value: integer `-1`, expected u32", "a whole number from 0 on was expected, not -1"),
            ("invalid type: integer `2`, expected a string", "a text in quotes was expected, not 2"),
            ("invalid type: string \"x\", expected f64", "a number was expected, not \"x\""),
            ("invalid type: sequence, expected a boolean", "true or false was expected, not a list"),
            ("unknown variant `quick`, expected `slow` or `fast`", "one of slow, fast was expected, not quick"),
            ("unknown variant `q`, expected one of `a`, `b`, `c`", "one of a, b, c was expected, not q"),
            ("a duration such as \"10s\" was expected", "a duration such as \"10s\" was expected"),
        ] {
            assert_eq!(of_type_error(message), words);
        }
        let long = format!("invalid type: string {:?}, expected u64", "x".repeat(9000));
        assert!(of_type_error(&long).chars().count() < 200);
    }
}
