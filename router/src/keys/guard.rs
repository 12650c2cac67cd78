//! Decides who may call the admin listener and the operators' socket. The guard is a layer around
//! all their pages, so a page added later is not open by accident. Web pages in a browser of this
//! host are kept out too.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use hostler_boot::admin::{CallOrigin, WRONG_HOST, names_this_host};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{Method, StatusCode, Version};
use tonic::Status;

use super::page_sessions::{PageRights, PageSessions};
use super::secret::{Digest, Secret};
use super::{Keys, Role, Unauthenticated, presented_key};
use crate::config::{NeedKey, RouterConfig};

/// Decides who may use the admin listener and the operators' socket.
#[derive(Debug)]
pub(crate) struct AdminGuard {
    keys: Keys,
    /// Sessions of the page's viewers.
    sessions: PageSessions,
    /// The key of this process, which `hostler up` uses.
    process_key: Digest,
    metrics_need_key: bool,
    /// The admin listener's configured address, a name under which loopback may be called.
    listen_address: String,
    /// The place where operators need no key, for the message of a refusal.
    socket_hint: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageKind {
    Health,
    Metrics,
    /// The page's files, which show nothing of the fleet, and the request for a session.
    Page,
    /// The page's views, for callers with a session.
    Watching,
    /// The page's orders, for a session that may operate.
    Ordering,
    /// Everything else: the views and actions of operators' programs.
    Operators,
}

/// The folder of the page's files.
const PAGE_FOLDER: &str = "/page/";

impl PageKind {
    fn of(path: &str) -> Self {
        match path {
            "/livez" | "/readyz" => Self::Health,
            path if path.starts_with("/grpc.health.v1.Health/") => Self::Health,
            "/metrics" => Self::Metrics,
            "/page/orders" => Self::Ordering,
            // A session that only watches sends no requests either.
            "/page/chat" | "/page/edge" => Self::Ordering,
            // What engines write is for operators.
            path if path.starts_with("/page/logs/") => Self::Ordering,
            "/" | "/page/session" => Self::Page,
            path => match path.strip_prefix(PAGE_FOLDER) {
                Some(file) if file.contains('.') && !file.contains('/') => Self::Page,
                Some(_) => Self::Watching,
                None => Self::Operators,
            },
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum AdminRefusal {
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
    #[error("this comes from another web page, by its header `{0}`: only the router's own page may ask this")]
    OtherPage(&'static str),
    #[error("the page has no session here, or it has ended: run `hostler page`")]
    NoSession,
    #[error("this session may watch and not operate: run `hostler page` without --watch")]
    OnlyWatching,
}

const SEC_FETCH_SITE: &str = "sec-fetch-site";

impl AdminGuard {
    /// Creates a guard. `own` is the key of this process; `socket` is where operators need no key.
    pub(crate) fn new(config: &RouterConfig, sessions: PageSessions, own: &Secret, listens: IpAddr, socket: Option<&Path>) -> Self {
        let keys = sessions.keys.clone();
        let metrics = match config.metrics_need_key {
            NeedKey::Auto => !listens.is_loopback(),
            NeedKey::Always => true,
            NeedKey::Never => false,
        };
        Self {
            metrics_need_key: metrics && keys.are_required(),
            process_key: own.digest(),
            listen_address: config.admin_listen.clone(),
            socket_hint: socket.map(|path| format!("; the router's own user needs none at {}", path.display())).unwrap_or_default(),
            keys,
            sessions,
        }
    }

    fn check(&self, request: &Request) -> Result<(), AdminRefusal> {
        let (via, headers) = (CallOrigin::of(request), request.headers());
        let page = PageKind::of(request.uri().path());
        if page == PageKind::Operators {
            refuse_browsers(request)?;
        }
        match (page, via) {
            (PageKind::Health, _) => Ok(()),
            // A browser may come over the socket too, through a tunnel.
            (PageKind::Page | PageKind::Watching | PageKind::Ordering, _) => self.check_page(page, request),
            (_, CallOrigin::Socket) => Ok(()),
            (PageKind::Operators, _) => self.check_admin(headers),
            (PageKind::Metrics, _) if self.metrics_need_key => self.check_admin(headers),
            (PageKind::Metrics, CallOrigin::Loopback) if !names_this_host(request.uri(), headers, &self.listen_address) => {
                Err(AdminRefusal::WrongHost)
            }
            (PageKind::Metrics, _) => Ok(()),
        }
    }

    /// Checks the page's own requests. A session comes in a header, which only the page's script
    /// can set and no browser sends by itself.
    fn check_page(&self, page: PageKind, request: &Request) -> Result<(), AdminRefusal> {
        let headers = request.headers();
        if CallOrigin::of(request) != CallOrigin::Network && !names_this_host(request.uri(), headers, &self.listen_address) {
            return Err(AdminRefusal::WrongHost);
        }
        // Any page may link to this one, and a link shows nothing.
        if page != PageKind::Page || request.method() != Method::GET {
            refuse_other_pages(request)?;
        }
        let rights = || page_session(headers).and_then(|session| self.sessions.rights(session)).ok_or(AdminRefusal::NoSession);
        match page {
            PageKind::Watching => rights().map(drop),
            PageKind::Ordering if rights()? < PageRights::Operate => Err(AdminRefusal::OnlyWatching),
            _ => Ok(()),
        }
    }

    fn check_admin(&self, headers: &HeaderMap) -> Result<(), AdminRefusal> {
        if presented_key(headers).is_ok_and(|shown| shown.parse().is_ok_and(|secret: Secret| secret.digest().matches(&self.process_key))) {
            return Ok(());
        }
        if !self.keys.are_required() {
            return Err(AdminRefusal::NoKeys(self.socket_hint.clone()));
        }
        let caller = self.keys.authenticate(headers).map_err(|error| AdminRefusal::Unauthenticated(error, self.socket_hint.clone()))?;
        if caller.role == Role::Admin { Ok(()) } else { Err(AdminRefusal::Role(caller.key)) }
    }
}

/// Refuses requests that a web page can make its reader's browser send, whatever their key or
/// address.
///
/// A page can reach loopback and, without a preflight, send what a form sends, but not gRPC. The
/// browser sets these headers itself, and a page cannot change them.
fn refuse_browsers(request: &Request) -> Result<(), AdminRefusal> {
    let headers = request.headers();
    if headers.contains_key(ORIGIN) {
        return Err(AdminRefusal::WebPage("origin"));
    }
    if headers.get(SEC_FETCH_SITE).is_some_and(|site| site != "none") {
        return Err(AdminRefusal::WebPage(SEC_FETCH_SITE));
    }
    if is_grpc(request) { Ok(()) } else { Err(AdminRefusal::NotGrpc) }
}

/// Refuses requests from pages of other origins, including other ports of this host.
fn refuse_other_pages(request: &Request) -> Result<(), AdminRefusal> {
    let headers = request.headers();
    if headers.get(SEC_FETCH_SITE).is_some_and(|site| site != "same-origin") {
        return Err(AdminRefusal::OtherPage(SEC_FETCH_SITE));
    }
    // HTTP/2 has the host in `:authority`, which is part of the URI.
    let authority = request.uri().authority().map(Authority::as_str);
    let host = authority.or_else(|| headers.get(HOST)?.to_str().ok()).unwrap_or_default();
    // A port serves one of the two schemes, so the other one is no origin of it.
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().unwrap_or_default();
        origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")) == Some(host)
    };
    if headers.get_all(ORIGIN).iter().all(is_own) { Ok(()) } else { Err(AdminRefusal::OtherPage("origin")) }
}

/// The session in a request of the page.
pub(crate) fn page_session(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Whether this is gRPC over HTTP/2. gRPC-Web is for browsers.
fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(CONTENT_TYPE).map_or(&[][..], HeaderValue::as_bytes);
    let is_kind = kind.strip_prefix(b"application/grpc").is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')));
    is_kind && request.version() == Version::HTTP_2
}

pub(crate) fn guard_pages(pages: Router, guard: AdminGuard) -> Router {
    pages.layer(from_fn_with_state(Arc::new(guard), check_request))
}

async fn check_request(State(guard): State<Arc<AdminGuard>>, mut request: Request, next: Next) -> Response {
    super::mark_sensitive(request.headers_mut());
    match guard.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refused) => refusal_response(&refused, is_grpc(&request)),
    }
}

fn refusal_response(refused: &AdminRefusal, is_grpc: bool) -> Response {
    let message = refused.to_string();
    let status = match refused {
        AdminRefusal::Unauthenticated(..) | AdminRefusal::NoSession => StatusCode::UNAUTHORIZED,
        AdminRefusal::Role(_)
        | AdminRefusal::NoKeys(_)
        | AdminRefusal::WebPage(_)
        | AdminRefusal::WrongHost
        | AdminRefusal::OtherPage(_)
        | AdminRefusal::OnlyWatching => StatusCode::FORBIDDEN,
        AdminRefusal::NotGrpc => StatusCode::UNSUPPORTED_MEDIA_TYPE,
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
