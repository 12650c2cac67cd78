//! Memory of a JSON body that is parsed into values.
//!
//! A body of small values takes fifty times its size, so parsers of untrusted bodies check here
//! first.

/// Bytes that a value, or a name of an object, takes while its list grows.
///
/// With names in their order `serde_json` has 72 bytes for a value and 104 for a field, and a
/// growing list holds up to three times its items.
const VALUE_BYTES: usize = 256;

/// Allowance of every body: 131,072 values and names.
const FREE_BYTES: usize = 32 * 1024 * 1024;

/// A body has more values than are parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body has {values} JSON values and names, and one of {bytes} bytes may have {most}: send fewer at once")]
pub struct TooManyValues {
    pub values: usize,
    pub bytes: usize,
    pub most: usize,
}

/// Checks that the values of a JSON body take at most 32 MiB and twice its size, whatever they are.
///
/// Their texts are not counted, because those take no more than the body.
///
/// # Errors
/// When they may take more.
pub fn check_tree_size(body: &[u8]) -> Result<(), TooManyValues> {
    let most = (FREE_BYTES + 2 * body.len()) / VALUE_BYTES;
    // Each value and name has at least one byte, so short bodies need not be counted.
    if body.len() <= most {
        return Ok(());
    }
    let values = count_values(body);
    if values <= most { Ok(()) } else { Err(TooManyValues { values, bytes: body.len(), most }) }
}

/// Number of values and names of a JSON body; any number for other bodies.
fn count_values(body: &[u8]) -> usize {
    let mut count = 1;
    let mut rest = body;
    loop {
        let text = memchr::memchr(b'"', rest);
        let between = &rest[..text.unwrap_or(rest.len())];
        count += between.iter().filter(|byte| matches!(byte, b',' | b':' | b'[' | b'{')).count();
        let Some(begin) = text else { return count };
        rest = after_text(&rest[begin + 1..]);
    }
}

/// Rest after a text that begins here.
fn after_text(mut rest: &[u8]) -> &[u8] {
    while let Some(at) = memchr::memchr2(b'"', b'\\', rest) {
        let is_escape = rest[at] == b'\\';
        rest = rest.get(at + 1 + usize::from(is_escape)..).unwrap_or_default();
        if !is_escape {
            return rest;
        }
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_texts() {
        for (body, values) in [
            ("{}", 2),
            (r#"{"a":1}"#, 3),
            (r#"[0,0,0]"#, 4),
            (r#"["a,b,[","\"{,:\\",""]"#, 4),
            (r#"[["#, 3),
            (r#"["never ends,,,,"#, 2),
            (r#"["\"#, 2),
        ] {
            assert_eq!(count_values(body.as_bytes()), values, "{body}");
        }
    }

    #[test]
    fn a_body_of_small_values_is_refused() {
        let list = |count: usize| format!("[{}0]", "0,".repeat(count));
        assert_eq!(check_tree_size(list(131_000).as_bytes()), Ok(()));
        let refused = check_tree_size(list(1_000_000).as_bytes()).unwrap_err();
        assert_eq!((refused.values, refused.bytes, refused.most), (1_000_002, 2_000_003, 146_697));
        assert_eq!(check_tree_size(format!("[\"{}\"]", ",".repeat(1_000_000)).as_bytes()), Ok(()));
    }
}
