//! The bytes of one event of a stream: where it ends, and its fields.

/// The first field of each name in an event.
pub(super) struct EventFields<'a> {
    /// Empty if the event has none.
    pub(super) name: &'a [u8],
    pub(super) data: Option<&'a [u8]>,
}

impl<'a> EventFields<'a> {
    pub(super) fn parse(event: &'a [u8]) -> Self {
        let (mut name, mut data) = (None, None);
        let mut begin = 0;
        while begin < event.len() {
            let end = memchr::memchr(b'\n', &event[begin..]).map_or(event.len(), |at| begin + at);
            let line = &event[begin..end];
            if let Some(value) = line.strip_prefix(b"data:") {
                data = data.or(Some(value));
            } else if let Some(value) = line.strip_prefix(b"event:") {
                name = name.or(Some(value));
            }
            begin = end + 1;
        }
        let trimmed = |value: &'a [u8]| value.strip_prefix(b" ").unwrap_or(value).trim_ascii_end();
        Self { name: name.map_or(b"", trimmed), data: data.map(trimmed) }
    }
}

/// Length of the first event with its blank line; `None` while it is incomplete.
#[must_use]
pub(crate) fn event_end(bytes: &[u8]) -> Option<usize> {
    let newlines = memchr::memchr_iter(b'\n', bytes);
    for at in newlines {
        match &bytes[at + 1..] {
            [b'\n', ..] => return Some(at + 2),
            [b'\r', b'\n', ..] => return Some(at + 3),
            _ => {}
        }
    }
    None
}
