//! How much is kept and written of what clients and agents name: a path, a model, an id of their own.

const MAX_TEXT_BYTES: usize = 128;

/// Its beginning.
pub(crate) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}
