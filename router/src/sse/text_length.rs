//! Measures the generated text of an event, for answers whose tokens nobody reports. The scanner
//! asks if the caller pays for tokens.

use memchr::memmem;

/// Bytes of text in these fields of an event. A field is named as in JSON, up to its first quote of
/// text.
#[must_use]
pub(super) fn text_bytes(fields: &[&[u8]], event: &[u8]) -> u64 {
    // Quotes within strings are escaped, so each find is a field.
    let texts = |field: &&[u8]| memmem::find_iter(event, field).map(|at| string_length(&event[at + field.len()..]) as u64).sum::<u64>();
    fields.iter().map(texts).sum()
}

/// Length of the JSON string whose first quote is before these bytes.
fn string_length(rest: &[u8]) -> usize {
    let is_escaped = |end: usize| rest[..end].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    memchr::memchr_iter(b'"', rest).find(|end| !is_escaped(*end)).unwrap_or(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_at_its_first_quote_without_escape() {
        let event = br#"data: {"choices":[{"delta":{"content":"a\"b\\","x":"y"}},{"delta":{"content":"cd"}}]}"#;
        assert_eq!(text_bytes(&[b"\"content\":\""], event), 8);
    }

    #[test]
    fn a_text_that_names_a_field_counts_once() {
        let event = br#"data: {"delta":"\"delta\":\"abc\""}"#;
        assert_eq!(text_bytes(&[b"\"delta\":\""], event), 17);
        assert_eq!(text_bytes(&[b"\"delta\":\""], br#"data: {"delta":"cut"#), 3);
    }
}
