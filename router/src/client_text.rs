//! Limits how much is kept and written of clients' and agents' names: a path, a model, an id of
//! their own.

const MAX_TEXT_BYTES: usize = 128;

/// The beginning of `text`, within the limit.
pub(crate) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}
