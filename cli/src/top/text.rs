//! Makes foreign text fit for a terminal's cells. Names, reasons and log lines come from clients,
//! engines and nodes, and could hold anything, such as sequences that a terminal obeys.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::output::{HIDDEN, without_escapes};

/// Marks the end of a cut text.
const CUT: char = '…';

/// A line without anything that a terminal would obey.
///
/// A tab becomes a blank. Any other control character becomes a point, and so do characters that
/// turn the direction of the text or have no width.
pub(super) fn printable(text: &str) -> String {
    without_escapes(text, |letter| match letter {
        '\t' => ' ',
        _ if is_printable(letter) => letter,
        _ => HIDDEN,
    })
}

/// Whether a character takes room and changes nothing beside itself.
pub(super) fn is_printable(letter: char) -> bool {
    letter.width().is_some_and(|width| width > 0)
}

/// Columns that a printable text takes.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// The text, or as much of it as this many columns hold.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (mut kept, mut taken) = (String::new(), 1);
    for letter in text.chars() {
        taken += letter.width().unwrap_or(0);
        if taken > columns {
            break;
        }
        kept.push(letter);
    }
    if columns > 0 {
        kept.push(CUT);
    }
    kept
}

/// Breaks a text into lines of this many columns, at blanks where possible.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is a line");
        if last.is_empty() {
            last.push_str(word);
        } else if width(last) + 1 + width(word) <= columns {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.iter().map(|line| cut(line, columns)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_are_removed_from_text() {
        assert_eq!(printable("\u{1b}[31mred\u{1b}[0m, \u{1b}]0;title\u{7}, a\tb\r\n"), "red, ·]0;title·, a b··");
        assert_eq!(printable("abc\u{202e}cba\u{200b}e\u{301}"), "abc·cba·e·");
        assert_eq!(printable("\u{9b}2J\u{1b}[2J\u{1b}["), "·2J");
        assert_eq!(printable("\u{1b}[\u{1b}[31m!"), "!", "a sequence within another one");
        assert!(printable("模型 é 1 %").chars().all(is_printable));
    }

    #[test]
    fn a_text_is_cut_by_its_display_columns() {
        assert_eq!((cut("abc", 3), cut("abcd", 3), cut("abcd", 0)), ("abc".into(), "ab…".into(), String::new()));
        assert_eq!(cut("模型模型", 6), "模型…");
        assert_eq!(wrap("drain a/0 and b/0?", 9), ["drain a/0", "and b/0?"]);
        assert_eq!(wrap("0123456789", 4), ["012…"]);
    }
}
