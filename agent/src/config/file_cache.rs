//! The setting `agent.file_cache`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sizes::{GIB, parse_size};

/// Bytes of files with what a host's engines have cached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub enum FileCacheSetting {
    #[default]
    Off,
    /// For all engines of the host together.
    Bytes(u64),
}

impl TryFrom<String> for FileCacheSetting {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.trim() {
            "off" => Ok(Self::Off),
            size => parse_size(size).map(Self::Bytes).ok_or_else(|| format!("{text:?} is neither `off` nor a size such as `200GiB`")),
        }
    }
}

impl From<FileCacheSetting> for String {
    fn from(setting: FileCacheSetting) -> Self {
        match setting {
            FileCacheSetting::Off => "off".to_owned(),
            FileCacheSetting::Bytes(bytes) => format!("{}GiB", bytes / GIB),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_sizes_are_refused_with_what_is_right() {
        for wrong in ["", "auto", "200", "0GiB"] {
            let error = FileCacheSetting::try_from(wrong.to_owned()).unwrap_err();
            assert!(error.contains("neither `off` nor a size such as `200GiB`"), "{error}");
        }
        for right in ["off", "200GiB", "2TiB"] {
            let setting = FileCacheSetting::try_from(right.to_owned()).unwrap();
            assert_eq!(FileCacheSetting::try_from(String::from(setting)).unwrap(), setting);
        }
    }
}
