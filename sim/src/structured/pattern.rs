//! Generator of a text that a regular expression matches as a whole, for `document` and for
//! requests that name an expression themselves.

use regex_syntax::hir::{Class, Hir, HirKind, Look};

use super::SchemaError;
use crate::tokens::Continuation;

/// Longest text in characters.
const MOST_CHARACTERS: usize = 4096;

/// Writes a text whose length is left to the expression.
pub(super) fn write(regex: &str, words: &mut Continuation) -> Result<String, SchemaError> {
    let surplus = words.pick(3);
    write_sized(regex, surplus, words).map(|matched| matched.text)
}

/// Text that matches a pattern.
pub(super) struct Match {
    pub(super) text: String,
    /// Whether an anchor forbids more text after the match.
    pub(super) is_anchored: bool,
}

/// Writes a match in which each repetition has `surplus` rounds more than the least, if it may.
pub(super) fn write_sized(regex: &str, surplus: usize, words: &mut Continuation) -> Result<Match, SchemaError> {
    let hir = regex_syntax::parse(regex).map_err(|error| SchemaError::invalid(error.to_string()))?;
    let mut writer = PatternWriter { text: String::new(), has_ended: false, surplus, words };
    writer.push(&hir)?;
    Ok(Match { text: writer.text, is_anchored: writer.has_ended })
}

struct PatternWriter<'a> {
    text: String,
    /// Whether an anchor forbids more text.
    has_ended: bool,
    surplus: usize,
    words: &'a mut Continuation,
}

impl PatternWriter<'_> {
    fn push(&mut self, hir: &Hir) -> Result<(), SchemaError> {
        match hir.kind() {
            HirKind::Empty => Ok(()),
            HirKind::Literal(literal) => {
                String::from_utf8_lossy(&literal.0).chars().try_for_each(|character| self.push_character(character))
            }
            HirKind::Class(class) => {
                let character = self.choose(class)?;
                self.push_character(character)
            }
            HirKind::Look(Look::Start | Look::StartLF | Look::StartCRLF) if self.text.is_empty() => Ok(()),
            HirKind::Look(Look::End | Look::EndLF | Look::EndCRLF) => {
                self.has_ended = true;
                Ok(())
            }
            HirKind::Look(Look::Start) => Err(SchemaError::unsatisfiable("an anchor is not at the beginning")),
            HirKind::Look(_) => Err(SchemaError::invalid("lookarounds not supported yet")),
            HirKind::Repetition(repetition) => {
                let most = repetition.max.unwrap_or(u32::MAX) as usize;
                let rounds = (repetition.min as usize + self.surplus).min(most);
                (0..rounds).try_for_each(|_| self.push(&repetition.sub))
            }
            HirKind::Capture(capture) => self.push(&capture.sub),
            HirKind::Concat(parts) => parts.iter().try_for_each(|part| self.push(part)),
            HirKind::Alternation(branches) => self.push_one(branches),
        }
    }

    fn push_one(&mut self, branches: &[Hir]) -> Result<(), SchemaError> {
        let (length, first) = (self.text.len(), self.words.pick(branches.len()));
        let mut outcome = Ok(());
        for branch in branches[first..].iter().chain(&branches[..first]) {
            outcome = self.push(branch);
            if !matches!(&outcome, Err(error) if !error.fatal) {
                return outcome;
            }
            self.text.truncate(length);
            self.has_ended = false;
        }
        outcome
    }

    fn push_character(&mut self, character: char) -> Result<(), SchemaError> {
        if self.has_ended {
            return Err(SchemaError::unsatisfiable("an anchor is not at the end"));
        }
        if self.text.len() >= MOST_CHARACTERS {
            return Err(SchemaError::invalid("the regular expression demands too long a text"));
        }
        self.text.push(character);
        Ok(())
    }

    /// Chooses a letter or digit of the class, else a printable character, else its first one.
    fn choose(&mut self, class: &Class) -> Result<char, SchemaError> {
        let Class::Unicode(class) = class else { return Err(SchemaError::invalid("bytes that are no text are not supported")) };
        let has = |character: &char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(character));
        for is_preferred in [char::is_ascii_lowercase, char::is_ascii_alphanumeric, char::is_ascii_graphic] {
            let candidates: Vec<char> = (' '..='~').filter(|character| is_preferred(character) && has(character)).collect();
            if !candidates.is_empty() {
                return Ok(candidates[self.words.pick(candidates.len())]);
            }
        }
        let first = class.ranges().first().map(|range| range.start());
        first.ok_or_else(|| SchemaError::unsatisfiable("a character class is empty"))
    }
}
