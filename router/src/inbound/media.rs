//! Decides which images, sounds and videos an engine may fetch for a request.
//!
//! An engine is inside the network and fetches any URL that it is given. Without a list of hosts,
//! anybody who may send a prompt could reach metadata services and neighbours. A URL is judged
//! strictly, because engines' libraries read odd ones differently: a host is letters, digits,
//! hyphens and dots, with at most a port behind it. This check cannot see what a name resolves to,
//! or where a server redirects to.

use std::borrow::Cow;
use std::fmt;
use std::sync::LazyLock;

use memchr::memmem::{self, Finder};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// Most bytes of a client's host that an error message repeats.
const MAX_SHOWN_HOST_BYTES: usize = 80;

#[derive(Debug, Clone, Default)]
pub(crate) struct MediaHosts {
    allow_all: bool,
    /// Host names in lower case.
    exact: Vec<String>,
    /// Suffixes of allowed names, with the dot in front.
    suffixes: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
#[error("router.media_hosts: {0:?} is no host: write `example.org`, `*.example.org`, or `*` for all; ports and paths do not count")]
pub struct InvalidMediaHost(String);

impl MediaHosts {
    pub(crate) fn new(hosts: &[String]) -> Result<Self, InvalidMediaHost> {
        let mut known = Self::default();
        for host in hosts {
            let name = host.to_ascii_lowercase();
            match name.strip_prefix("*.") {
                _ if name == "*" => known.allow_all = true,
                Some(rest) if is_name(rest) => known.suffixes.push(format!(".{rest}")),
                None if is_name(&name) => known.exact.push(name),
                _ => return Err(InvalidMediaHost(host.clone())),
            }
        }
        Ok(known)
    }

    /// Checks every URL of a JSON body that an engine would fetch. If tenants are kept apart, names
    /// of media that an engine would remember for all tenants are refused too.
    ///
    /// # Errors
    /// If one of them is not allowed; the message is for the client.
    pub(super) fn check(&self, body: &[u8], apart: bool) -> Result<(), String> {
        if !may_have_urls(body) && (!apart || memmem::find(body, b"uuid").is_none()) {
            return Ok(());
        }
        let mut found = MediaReferences::default();
        let mut json = serde_json::Deserializer::from_slice(body);
        // Engines read deeper nesting than this parser, so deeper bodies must not pass unseen.
        let walked = MediaWalker { found: &mut found, position: MediaPosition::Body }.deserialize(&mut json);
        walked.map_err(|error| format!("the body cannot be searched for the URLs of media: {error}"))?;
        if apart && found.has_uuid {
            return Err("tenants' caches are kept apart here, so media cannot be named by `uuid`: send them themselves".into());
        }
        found.urls.iter().try_for_each(|url| self.check_url(url))
    }

    fn check_url(&self, url: &str) -> Result<(), String> {
        let scheme = |name: &str| url.get(..name.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(name));
        if scheme("data:") {
            return Ok(());
        }
        let Some(rest) = ["http://", "https://"].iter().find(|name| scheme(name)).map(|name| &url[name.len()..]) else {
            return Err("media come as `data:` URLs, or as http and https URLs of hosts that are allowed here".into());
        };
        if self.allow_all {
            return Ok(());
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host = authority.split_once(':').map_or(authority, |(host, port)| {
            // Anything but a port makes the host invalid.
            if port.bytes().all(|byte| byte.is_ascii_digit()) { host } else { authority }
        });
        let name = host.to_ascii_lowercase();
        let name = name.strip_suffix('.').unwrap_or(&name);
        if is_name(name) && self.allows_host(name) {
            return Ok(());
        }
        let shown = if is_name(name) { &host[..host.floor_char_boundary(MAX_SHOWN_HOST_BYTES)] } else { "given" };
        Err(format!(
            "media of the host `{shown}` are not fetched here: send them as a `data:` URL, or ask whoever runs the router to list the host in \
             router.media_hosts"
        ))
    }

    fn allows_host(&self, name: &str) -> bool {
        self.exact.iter().any(|exact| exact == name)
            || self.suffixes.iter().any(|ending| name.ends_with(ending) && name.len() > ending.len())
    }
}

/// Whether `name` could be a host's name or an IPv4 address, in lower case. Addresses are compared
/// as text.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_'))
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether a body contains anything like a media field, even with an escaped letter (`\u005f` to
/// `\u007a`). Hardly any body does, and the others are not parsed.
fn may_have_urls(body: &[u8]) -> bool {
    static NAMES: LazyLock<[Finder<'static>; 5]> =
        LazyLock::new(|| ["url\"", "\"source\"", "\"images\"", "\"audio\"", "\"videos\""].map(Finder::new));
    static ESCAPES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\\u00"));
    let is_letter = |at: usize| body.get(at + 4).is_some_and(|digit| (b'4'..=b'7').contains(digit));
    NAMES.iter().any(|name| name.find(body).is_some()) || ESCAPES.find_iter(body).any(is_letter)
}

#[derive(Debug, Default)]
struct MediaReferences<'de> {
    urls: Vec<Cow<'de, str>>,
    /// The client gave a medium a name.
    has_uuid: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MediaPosition {
    Body,
    /// Anywhere within the body.
    Within,
    /// The value of a name such as `image_url`: a URL, or an object with one.
    Medium,
    /// The value of Anthropic's `source`.
    Source,
    /// The value of a name such as `images`: URLs, or the media themselves.
    List,
    /// Nothing below is fetched.
    Opaque,
}

/// Fields whose values are the client's own and from which engines fetch nothing: schemas,
/// arguments of tools, and the like.
const OPAQUE_FIELDS: [&str; 11] = [
    "tools",
    "tool_choice",
    "functions",
    "arguments",
    "parameters",
    "input_schema",
    "metadata",
    "response_format",
    "structured_outputs",
    "chat_template_kwargs",
    "logit_bias",
];

const MEDIA_FIELDS: [&str; 9] =
    ["image_url", "audio_url", "video_url", "file_url", "input_audio", "image_pil", "image_embeds", "audio_embeds", "video_embeds"];

/// Walks through a value and collects everything that must be checked.
struct MediaWalker<'a, 'de> {
    found: &'a mut MediaReferences<'de>,
    position: MediaPosition,
}

impl<'de> DeserializeSeed<'de> for MediaWalker<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MediaWalker<'_, 'de> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (mut has_name, mut has_medium) = (false, false);
        let (mut is_url, mut url) = (false, None);
        while let Some(JsonText(name)) = map.next_key()? {
            has_medium |= MEDIA_FIELDS.contains(&&*name);
            let place = match (self.position, &*name) {
                (MediaPosition::Medium, "url") => MediaPosition::Medium,
                (MediaPosition::Source, "type" | "url") => {
                    let value = map.next_value::<&RawValue>()?.get();
                    let Ok(JsonText(value)) = serde_json::from_str(value) else { continue };
                    if name == "url" {
                        url = Some(value);
                    } else {
                        is_url |= value == "url";
                    }
                    continue;
                }
                (_, "uuid") => {
                    has_name |= map.next_value::<&RawValue>()?.get() != "null";
                    continue;
                }
                // `input` is a tool's arguments, but at the top level the whole prompt.
                (MediaPosition::Body, "input") => MediaPosition::Within,
                (_, "input") => MediaPosition::Opaque,
                (_, name) if OPAQUE_FIELDS.contains(&name) => MediaPosition::Opaque,
                (_, name) if name.ends_with("_url") => MediaPosition::Medium,
                (_, "source") => MediaPosition::Source,
                (_, "images" | "audio" | "videos") => MediaPosition::List,
                _ => MediaPosition::Within,
            };
            if place == MediaPosition::Opaque {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(MediaWalker { found: self.found, position: place })?;
            }
        }
        self.found.has_uuid |= has_name && has_medium;
        self.found.urls.extend(url.filter(|_| is_url));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let place = if self.position == MediaPosition::List { MediaPosition::List } else { MediaPosition::Within };
        while list.next_element_seed(MediaWalker { found: self.found, position: place })?.is_some() {}
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<(), E> {
        self.collect(text.into());
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.collect(text.to_owned().into());
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

impl<'de> MediaWalker<'_, 'de> {
    fn collect(self, text: Cow<'de, str>) {
        // Bytes in base64 have no colon.
        if self.position == MediaPosition::Medium || self.position == MediaPosition::List && text.contains(':') {
            self.found.urls.push(text);
        }
    }
}

/// A name or a text, borrowed from the body unless it has escapes.
#[derive(Deserialize)]
struct JsonText<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests;
