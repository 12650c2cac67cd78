//! Engine output kept for the next agent: the beginning, which shows how the start went, and the
//! end.

use std::collections::VecDeque;

/// Bytes kept of the beginning. vLLM's whole start-up log is 20 to 60 KiB.
const MAX_HEAD_BYTES: usize = 128 * 1024;

/// Bytes kept of the end, which is about 300 lines.
const MAX_TAIL_BYTES: usize = 48 * 1024;

#[derive(Debug, Default)]
pub(super) struct OutputReplay {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Bytes dropped between the two.
    dropped_bytes: usize,
}

impl OutputReplay {
    /// Adds the next output.
    pub(super) fn push(&mut self, piece: &[u8]) {
        let (head, rest) = piece.split_at(piece.len().min(MAX_HEAD_BYTES - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(rest);
        let over = self.tail.len().saturating_sub(MAX_TAIL_BYTES);
        self.tail.drain(..over);
        self.dropped_bytes += over;
    }

    /// All kept output in pieces, oldest first.
    pub(super) fn chunks(&self) -> Vec<Vec<u8>> {
        let mut tail: Vec<u8> = self.tail.iter().copied().collect();
        if self.dropped_bytes > 0 {
            // The rest of a cut line is not a line.
            let cut = tail.iter().position(|byte| *byte == b'\n').map_or(tail.len(), |end| end + 1);
            tail.drain(..cut);
            let notice = format!("\n[{} bytes of output are in the log file only]\n", self.dropped_bytes + cut);
            return vec![self.head.clone(), notice.into_bytes(), tail];
        }
        vec![self.head.clone(), tail]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_output_keeps_its_beginning_and_its_end() {
        let mut echo = OutputReplay::default();
        echo.push(b"first\n");
        echo.push(b"second\n");
        assert_eq!(echo.chunks().concat(), b"first\nsecond\n");
        for number in 0..100_000 {
            echo.push(format!("line {number}\n").as_bytes());
        }
        let text = String::from_utf8(echo.chunks().concat()).unwrap();
        assert!(text.starts_with("first\nsecond\nline 0\n") && text.ends_with("line 99999\n"), "{} bytes", text.len());
        assert!(text.len() < MAX_HEAD_BYTES + MAX_TAIL_BYTES + 100 && text.contains("bytes of output are in the log file only"));
        let after = text.split("file only]\n").nth(1).unwrap();
        assert!(after.starts_with("line "), "{}", &after[..20]);
    }
}
