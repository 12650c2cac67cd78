//! Ids of files and batches: a prefix, the time of creation and random digits. So they sort by
//! age, nobody guesses one, and nothing else can be the name of a folder.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Hexadecimal digits of the time, in milliseconds since 1970.
const TIME_DIGITS: usize = 12;

/// Hexadecimal digits that are random.
const RANDOM_DIGITS: usize = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    File,
    Batch,
}

impl ObjectKind {
    fn prefix(self) -> &'static str {
        match self {
            Self::File => "file-",
            Self::Batch => "batch_",
        }
    }
}

/// The id of a file or a batch, which is also the name of its folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct ObjectId(Box<str>);

impl ObjectId {
    /// A new id, of `random` bytes and a time in milliseconds since 1970.
    pub(crate) fn new(kind: ObjectKind, milliseconds: u64, random: [u8; RANDOM_DIGITS / 2]) -> Self {
        let random: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let time = milliseconds & ((1 << (4 * TIME_DIGITS)) - 1);
        Self(format!("{}{time:0TIME_DIGITS$x}{random}", kind.prefix()).into())
    }

    /// `None` if the text is no id of this kind.
    pub(crate) fn parse(kind: ObjectKind, text: &str) -> Option<Self> {
        let digits = text.strip_prefix(kind.prefix())?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (digits.len() == TIME_DIGITS + RANDOM_DIGITS && digits.bytes().all(is_digit)).then(|| Self(text.into()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ObjectId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let parsed = [ObjectKind::File, ObjectKind::Batch].into_iter().find_map(|kind| Self::parse(kind, &text));
        parsed.ok_or("this is no id of a file or a batch")
    }
}

impl From<ObjectId> for String {
    fn from(id: ObjectId) -> Self {
        id.0.into()
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_no_path_and_sorts_by_time() {
        let [first, second] = [1, 2].map(|time| ObjectId::new(ObjectKind::File, time, [0xab; 10]));
        assert!(first < second && first.as_str().len() == 37, "{first}");
        assert_eq!(ObjectId::parse(ObjectKind::File, first.as_str()), Some(first.clone()));
        assert_eq!(ObjectId::parse(ObjectKind::Batch, first.as_str()), None);
        for odd in ["", "file-", "file-..", "file-../../../../../../etc/passwd0000", &first.as_str().to_uppercase(), &format!("{first}0")] {
            assert_eq!(ObjectId::parse(ObjectKind::File, odd), None, "{odd}");
        }
    }
}
