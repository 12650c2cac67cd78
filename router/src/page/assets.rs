//! The page's files, which are part of the program, and headers that limit what a browser does with
//! them.

use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, StatusCode, header};

/// Only files of this listener, no script or style within the document, no frame around it. Text
/// never becomes markup: `trusted-types` makes browsers refuse that, whatever the script does.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                                       base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                                       trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 7] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 18] = [
    ("page.css", "text/css; charset=utf-8", include_str!("assets/page.css")),
    ("parts.css", "text/css; charset=utf-8", include_str!("assets/parts.css")),
    ("app.js", SCRIPT, include_str!("assets/app.js")),
    ("chat.js", SCRIPT, include_str!("assets/chat.js")),
    ("charts.js", SCRIPT, include_str!("assets/charts.js")),
    ("dialog.js", SCRIPT, include_str!("assets/dialog.js")),
    ("dom.js", SCRIPT, include_str!("assets/dom.js")),
    ("explain.js", SCRIPT, include_str!("assets/explain.js")),
    ("figures.js", SCRIPT, include_str!("assets/figures.js")),
    ("fleet.js", SCRIPT, include_str!("assets/fleet.js")),
    ("hour.js", SCRIPT, include_str!("assets/hour.js")),
    ("log.js", SCRIPT, include_str!("assets/log.js")),
    ("model.js", SCRIPT, include_str!("assets/model.js")),
    ("orders.js", SCRIPT, include_str!("assets/orders.js")),
    ("replica.js", SCRIPT, include_str!("assets/replica.js")),
    ("session.js", SCRIPT, include_str!("assets/session.js")),
    ("strip.js", SCRIPT, include_str!("assets/strip.js")),
    ("usage.js", SCRIPT, include_str!("assets/usage.js")),
];

pub(super) async fn document() -> Response {
    ([(CONTENT_TYPE, "text/html; charset=utf-8")], include_str!("assets/page.html")).into_response()
}

pub(super) async fn file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(known, _, _)| *known == name) {
        Some((_, kind, text)) => ([(CONTENT_TYPE, *kind)], *text).into_response(),
        None => (StatusCode::NOT_FOUND, "the page has no such file\n").into_response(),
    }
}

pub(super) fn add_headers(headers: &mut HeaderMap) {
    headers.extend(HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))));
}
