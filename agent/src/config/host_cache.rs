//! The setting `agent.host_cache`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sizes::{GIB, parse_size};

/// Host memory for copies of what engines have cached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub enum HostCacheSetting {
    #[default]
    Off,
    /// What the host or the job has to spare.
    Auto,
    /// Bytes of each node, for all of its engines together.
    Bytes(u64),
}

impl TryFrom<String> for HostCacheSetting {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.trim() {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            size => {
                parse_size(size).map(Self::Bytes).ok_or_else(|| format!("{text:?} is neither `off` nor `auto` nor a size such as `64GiB`"))
            }
        }
    }
}

impl From<HostCacheSetting> for String {
    fn from(setting: HostCacheSetting) -> Self {
        match setting {
            HostCacheSetting::Off => "off".to_owned(),
            HostCacheSetting::Auto => "auto".to_owned(),
            HostCacheSetting::Bytes(bytes) => format!("{}GiB", bytes / GIB),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_sizes_are_refused_with_what_is_right() {
        for wrong in ["", "64", "64GB", "-1GiB", "0GiB", "99999999999999999GiB"] {
            let error = HostCacheSetting::try_from(wrong.to_owned()).unwrap_err();
            assert!(error.contains("neither `off` nor `auto` nor a size such as `64GiB`"), "{error}");
        }
        for right in ["off", "auto", "64GiB", "2TiB"] {
            let setting = HostCacheSetting::try_from(right.to_owned()).unwrap();
            assert_eq!(HostCacheSetting::try_from(String::from(setting)).unwrap(), setting);
        }
    }
}
