//! Who may call the admin listener: a layer around all its pages, so that a page that is added later is not open by accident.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
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
    operators: bool,
    metrics: bool,
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
    #[error("{0}; an admin key: `hostler` reads it from --admin-key-file FILE or from HOSTLER_ADMIN_KEY")]
    Unauthenticated(#[from] Unauthenticated),
    #[error("the key {0} is for sending requests; operators need one with the role admin: `hostler keys create --role admin`")]
    Role(Arc<str>),
}

impl Guard {
    /// The guard of an admin listener at this address. Without keys all is open.
    pub(crate) fn new(config: &RouterConfig, keys: Keys, own: &Secret, listens: IpAddr) -> Self {
        let needs = |need: NeedKey| {
            keys.are_wanted()
                && match need {
                    NeedKey::Auto => !listens.is_loopback(),
                    NeedKey::Always => true,
                    NeedKey::Never => false,
                }
        };
        Self { operators: needs(config.operators_need_key), metrics: needs(config.metrics_need_key), own: own.digest(), keys }
    }

    /// Whether operators have to show a key.
    pub(crate) fn wants_operators_key(&self) -> bool {
        self.operators
    }

    fn check(&self, path: &str, headers: &HeaderMap) -> Result<(), Refused> {
        let needs_key = match Page::of(path) {
            Page::Health => false,
            Page::Metrics => self.metrics,
            Page::Operators => self.operators,
        };
        if !needs_key || shown(headers)?.parse().is_ok_and(|secret: Secret| secret.digest().is(&self.own)) {
            return Ok(());
        }
        let caller = self.keys.authenticate(headers)?;
        if caller.role == Role::Admin { Ok(()) } else { Err(Refused::Role(caller.key)) }
    }
}

/// These pages, behind a guard.
pub(crate) fn guarded(pages: Router, guard: Guard) -> Router {
    pages.layer(from_fn_with_state(Arc::new(guard), pass))
}

async fn pass(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    super::hide(request.headers_mut());
    match guard.check(request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refused) => answer(&refused, request.headers()),
    }
}

fn answer(refused: &Refused, headers: &HeaderMap) -> Response {
    let message = refused.to_string();
    let is_grpc = headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    let (status, mut response) = match refused {
        _ if is_grpc => {
            let status = match refused {
                Refused::Unauthenticated(_) => Status::unauthenticated(message),
                Refused::Role(_) => Status::permission_denied(message),
            };
            return status.into_http();
        }
        Refused::Unauthenticated(_) => (StatusCode::UNAUTHORIZED, Response::new(format!("{message}\n").into())),
        Refused::Role(_) => (StatusCode::FORBIDDEN, Response::new(format!("{message}\n").into())),
    };
    *response.status_mut() = status;
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests;
