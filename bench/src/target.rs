//! Targets of requests, as written on the command line. `client` connects to them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// An OpenAI endpoint, or a page of metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Text as it was written.
    text: String,
    pub(crate) place: Place,
    /// Path before `/chat/completions`, or the page's own; without a slash at its end.
    pub(crate) path: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Address as `HOST:PORT`.
    Tcp(String),
    Unix(PathBuf),
    /// Address as `HOST:PORT`, with TLS. Nothing here speaks TLS: another component connects to it.
    Secured(String),
}

impl Target {
    /// Parses a page of metrics.
    ///
    /// The format is that of a target, but the default path is `/metrics`.
    ///
    /// # Errors
    ///
    /// Same as for targets.
    pub fn page(text: &str) -> Result<Self, String> {
        Self::parse(text, "/metrics")
    }

    /// Path before `/chat/completions`, without a slash at its end.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Address without a path, if it has TLS. Such a target is reached only through a component
    /// that speaks TLS.
    #[must_use]
    pub fn secured_origin(&self) -> Option<String> {
        matches!(self.place, Place::Secured(_)).then(|| self.place.to_string())
    }

    /// Redirects the target to this socket, which leads to it.
    #[must_use]
    pub fn through(self, socket: PathBuf) -> Self {
        Self { place: Place::Unix(socket), ..self }
    }

    /// Page of metrics of the target, where engines and routers usually have it.
    pub(crate) fn metrics(&self) -> Self {
        Self { text: format!("{}/metrics", self.place), place: self.place.clone(), path: "/metrics".to_owned() }
    }

    fn parse(text: &str, path: &str) -> Result<Self, String> {
        if let Some(socket) = text.strip_prefix("unix:") {
            return if socket.is_empty() {
                Err("a path belongs after unix:".to_owned())
            } else {
                Ok(Self { text: text.to_owned(), place: Place::Unix(socket.into()), path: path.to_owned() })
            };
        }
        let (scheme, rest) = text.split_once("://").ok_or("expected http://HOST:PORT or unix:PATH")?;
        let (authority, given) = rest.split_once('/').unwrap_or((rest, ""));
        let place = match scheme {
            "http" => Place::Tcp(authority_with_port(authority, 80)?),
            "https" => Place::Secured(authority_with_port(authority, 443)?),
            _ => return Err("expected http://HOST:PORT or unix:PATH".to_owned()),
        };
        let given = given.trim_end_matches('/');
        if given.contains(['?', '#', ' ']) {
            return Err("a path of a target has no query and no spaces".to_owned());
        }
        let path = if given.is_empty() { path.to_owned() } else { format!("/{given}") };
        Ok(Self { text: text.to_owned(), place, path })
    }
}

fn authority_with_port(authority: &str, port: u16) -> Result<String, String> {
    let expected = || "expected http://HOST:PORT or unix:PATH".to_owned();
    if authority.is_empty() || authority.contains(['@', ' ', '?', '#']) {
        return Err(expected());
    }
    // The colons within the brackets of an IPv6 address do not begin a port.
    match authority.rsplit_once(':').filter(|(_, after)| !after.ends_with(']')) {
        None => Ok(format!("{authority}:{port}")),
        Some((host, given)) if !host.is_empty() && given.parse::<u16>().is_ok() => Ok(authority.to_owned()),
        Some(_) => Err(expected()),
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, "/v1")
    }
}

impl fmt::Display for Target {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.text)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(authority) => write!(to, "http://{authority}"),
            Self::Unix(path) => write!(to, "unix:{}", path.display()),
            Self::Secured(authority) => write!(to, "https://{authority}"),
        }
    }
}

#[cfg(test)]
mod tests;
