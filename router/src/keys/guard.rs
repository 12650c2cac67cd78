//! Who may call the admin listener and the operators' socket: a layer around all their pages, so that a page that is added later is not open
//! by accident. Web pages in a browser of this host are among the callers that are kept out.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use hostler_boot::admin::{CallOrigin, WRONG_HOST, names_this_host};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::{StatusCode, Version};
use tonic::Status;

use super::secret::{Digest, Secret};
use super::{Keys, Role, Unauthenticated, shown};
use crate::config::{NeedKey, RouterConfig};

/// What decides who may call.
#[derive(Debug)]
pub(crate) struct Guard {
    keys: Keys,
    /// The key of this process itself, which `hostler up` has.
    own: Digest,
    /// Whether the metrics page needs a key.
    metrics: bool,
    /// The admin listener's address as it was configured, whose name loopback may be called by.
    listens: String,
    /// Where operators need no key, for those who are refused.
    socket: String,
}

/// What a path is, for a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    /// Says whether this router lives and serves.
    Health,
    /// What it counts.
    Metrics,
    /// All else: what operators see and do.
    Operators,
}

impl Page {
    fn of(path: &str) -> Self {
        match path {
            "/livez" | "/readyz" => Self::Health,
            path if path.starts_with("/grpc.health.v1.Health/") => Self::Health,
            "/metrics" => Self::Metrics,
            _ => Self::Operators,
        }
    }
}

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("{0}; an admin key: `hostler` reads it from --admin-key-file FILE or from HOSTLER_ADMIN_KEY{1}")]
    Unauthenticated(Unauthenticated, String),
    #[error("the key {0} is for sending requests; operators need one with the role admin: `hostler keys create --role admin`")]
    Role(Arc<str>),
    #[error("operators' calls need an admin key here, and this router has no keys (setting router.keys_file){0}")]
    NoKeys(String),
    #[error(
        "operators' calls are gRPC (HTTP/2, `content-type: application/grpc`): use the program `hostler`; pages are /livez, /readyz and /metrics"
    )]
    NotGrpc,
    #[error("this comes from a web page, by its header `{0}`: operators' calls are not for browsers")]
    WebPage(&'static str),
    #[error("{}", WRONG_HOST.trim_end())]
    WrongHost,
}

const SEC_FETCH_SITE: &str = "sec-fetch-site";

impl Guard {
    /// The guard of an admin listener at this address, and of the operators' socket.
    pub(crate) fn new(config: &RouterConfig, keys: Keys, own: &Secret, listens: IpAddr, socket: Option<&Path>) -> Self {
        let metrics = match config.metrics_need_key {
            NeedKey::Auto => !listens.is_loopback(),
            NeedKey::Always => true,
            NeedKey::Never => false,
        };
        Self {
            metrics: metrics && keys.are_wanted(),
            own: own.digest(),
            listens: config.admin_listen.clone(),
            socket: socket.map(|path| format!("; the router's own user needs none at {}", path.display())).unwrap_or_default(),
            keys,
        }
    }

    fn check(&self, request: &Request) -> Result<(), Refused> {
        let (via, headers) = (CallOrigin::of(request), request.headers());
        let page = Page::of(request.uri().path());
        if page == Page::Operators {
            refuse_browsers(request)?;
        }
        match (page, via) {
            (Page::Health, _) | (_, CallOrigin::Socket) => Ok(()),
            (Page::Operators, _) => self.check_admin(headers),
            (Page::Metrics, _) if self.metrics => self.check_admin(headers),
            (Page::Metrics, CallOrigin::Loopback) if !names_this_host(request.uri(), headers, &self.listens) => Err(Refused::WrongHost),
            (Page::Metrics, _) => Ok(()),
        }
    }

    /// Whether there is a key of an admin.
    fn check_admin(&self, headers: &HeaderMap) -> Result<(), Refused> {
        if shown(headers).is_ok_and(|shown| shown.parse().is_ok_and(|secret: Secret| secret.digest().is(&self.own))) {
            return Ok(());
        }
        if !self.keys.are_wanted() {
            return Err(Refused::NoKeys(self.socket.clone()));
        }
        let caller = self.keys.authenticate(headers).map_err(|error| Refused::Unauthenticated(error, self.socket.clone()))?;
        if caller.role == Role::Admin { Ok(()) } else { Err(Refused::Role(caller.key)) }
    }
}

/// Refuses what a web page can have its reader's browser send, whatever key or address is behind it. A page reaches loopback, and without
/// asking first it may send what a form sends: not gRPC. These headers are the browser's own, which a page cannot change.
fn refuse_browsers(request: &Request) -> Result<(), Refused> {
    let headers = request.headers();
    if headers.contains_key(ORIGIN) {
        return Err(Refused::WebPage("origin"));
    }
    if headers.get(SEC_FETCH_SITE).is_some_and(|site| site != "none") {
        return Err(Refused::WebPage(SEC_FETCH_SITE));
    }
    if is_grpc(request) { Ok(()) } else { Err(Refused::NotGrpc) }
}

/// Whether this is gRPC: over HTTP/2, and not gRPC-Web, which is for browsers.
fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(CONTENT_TYPE).map_or(&[][..], HeaderValue::as_bytes);
    let is_kind = kind.strip_prefix(b"application/grpc").is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')));
    is_kind && request.version() == Version::HTTP_2
}

/// These pages, behind a guard.
pub(crate) fn guarded(pages: Router, guard: Guard) -> Router {
    pages.layer(from_fn_with_state(Arc::new(guard), pass))
}

async fn pass(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    super::hide(request.headers_mut());
    match guard.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refused) => answer(&refused, is_grpc(&request)),
    }
}

fn answer(refused: &Refused, is_grpc: bool) -> Response {
    let message = refused.to_string();
    let status = match refused {
        Refused::Unauthenticated(..) => StatusCode::UNAUTHORIZED,
        Refused::Role(_) | Refused::NoKeys(_) | Refused::WebPage(_) | Refused::WrongHost => StatusCode::FORBIDDEN,
        Refused::NotGrpc => StatusCode::UNSUPPORTED_MEDIA_TYPE,
    };
    if is_grpc {
        let refused =
            if status == StatusCode::UNAUTHORIZED { Status::unauthenticated(message) } else { Status::permission_denied(message) };
        return refused.into_http();
    }
    let mut response = Response::new(format!("{message}\n").into());
    *response.status_mut() = status;
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests;
