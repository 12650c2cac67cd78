//! Lines of an event stream, however its bytes are cut.

/// Keeps the beginning of the current line.
#[derive(Debug, Default)]
pub(crate) struct LineBuffer {
    partial: Vec<u8>,
}

impl LineBuffer {
    /// Passes each line that is whole now to `read`, without its end. Each byte is searched once.
    ///
    /// # Errors
    /// The first one of `read`. The lines after it are lost.
    pub(crate) fn push<E>(&mut self, mut bytes: &[u8], mut read: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.partial.is_empty() {
                read(&bytes[..end])?;
            } else {
                self.partial.extend_from_slice(&bytes[..end]);
                read(&std::mem::take(&mut self.partial))?;
            }
            bytes = &bytes[end + 1..];
        }
        self.partial.extend_from_slice(bytes);
        Ok(())
    }

    /// Bytes of the current line so far.
    pub(crate) fn len(&self) -> usize {
        self.partial.len()
    }

    /// The current line, now that nothing follows.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.partial)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn lines_are_the_same_however_they_are_cut() {
        let text = b"a\n\nbc\r\nd";
        for size in 1..=text.len() {
            let (mut lines, mut read) = (LineBuffer::default(), Vec::new());
            for piece in text.chunks(size) {
                let Ok(()) = lines.push(piece, |line| {
                    read.push(line.to_vec());
                    Ok::<_, Infallible>(())
                });
            }
            assert_eq!(read, [&b"a"[..], b"", b"bc\r"]);
            assert_eq!((lines.len(), lines.take()), (1, b"d".to_vec()));
        }
    }
}
