//! The response that a request names: in its path, or as the one that it continues.

use hostler_api::Route;
use http::Method;
use percent_encoding::percent_decode_str;

/// Requests to this path create responses.
const RESPONSES_PATH: &str = Route::Responses.path();

/// How a request relates to stored responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ResponseReference {
    /// The request concerns no response.
    None,
    /// The request creates a response.
    Creates,
    /// The request creates a response that continues this one.
    Continues(String),
    /// The request reads or changes this response.
    Addresses(String),
}

impl ResponseReference {
    /// Reads the method, the path, and the body's `previous_response_id`. Engines undo percent
    /// encoding once before they route.
    #[must_use]
    pub(crate) fn parse(method: &Method, path: &str, previous: Option<&str>) -> Self {
        // Hardly any path has escapes, and looking for them letter by letter took 500 instructions.
        let path = if path.contains('%') { percent_decode_str(path).decode_utf8_lossy() } else { path.into() };
        let Some(rest) = path.strip_prefix(RESPONSES_PATH) else { return Self::None };
        match (rest.strip_prefix('/'), previous) {
            (None, _) if !rest.is_empty() || method != Method::POST => Self::None,
            (None, Some(previous)) => Self::Continues(previous.to_owned()),
            (None, None) => Self::Creates,
            (Some(below), previous) => {
                let id = below.split('/').next().unwrap_or_default();
                match id {
                    // Scale-out engines preview here how a request for a new response would look.
                    "render" if method == Method::POST => previous.map_or(Self::None, |previous| Self::Continues(previous.to_owned())),
                    "" => Self::None,
                    id => Self::Addresses(id.to_owned()),
                }
            }
        }
    }

    #[must_use]
    pub(crate) fn creates_response(&self) -> bool {
        matches!(self, Self::Creates | Self::Continues(_))
    }

    #[must_use]
    pub(crate) fn id(&self) -> Option<&str> {
        match self {
            Self::Continues(id) | Self::Addresses(id) => Some(id),
            Self::None | Self::Creates => None,
        }
    }
}
