//! The edge's own documentation, made of docs/openapi.json: `/openapi.json` for programs and
//! `/docs` for people.

use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use hostler_api::Route;
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use minijinja::value::Serde;
use minijinja::{Environment, context};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::reply::{self, EdgeBody};

/// The document, written by hand. `make hardening` makes requests of it, sound and broken ones.
const SOURCE: &str = include_str!("../../../docs/openapi.json");

const TEMPLATE: &str = include_str!("api_docs/page.html");

const STYLE: &str = include_str!("api_docs/page.css");

/// Policy for a page without scripts, which loads nothing and has one style.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let style = BASE64_STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!("default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    HeaderValue::try_from(policy).expect("base64 is ASCII")
});

/// The docs of a router without keys, and those of one with keys.
static API_DOCS: [LazyLock<ApiDocs>; 2] = [LazyLock::new(|| ApiDocs::new(false)), LazyLock::new(|| ApiDocs::new(true))];

struct ApiDocs {
    document: Bytes,
    page: Bytes,
}

/// The document for programs, or the page for people.
pub(super) fn answer(route: Route, needs_keys: bool) -> Response<EdgeBody> {
    let docs = &*API_DOCS[usize::from(needs_keys)];
    if route == Route::OpenApi {
        return reply::json(StatusCode::OK, docs.document.clone());
    }
    let mut response = Response::new(EdgeBody::Local(Some(docs.page.clone())));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    response
}

impl ApiDocs {
    fn new(needs_keys: bool) -> Self {
        let mut document: Value = serde_json::from_str(SOURCE).expect("a test reads it");
        document["security"] = if needs_keys { json!([{"key": []}]) } else { json!([]) };
        let mut environment = Environment::new();
        environment.add_template("page.html", TEMPLATE).expect("a test renders it");
        let page = environment.get_template("page.html").expect("it was added");
        let whole = context! { document => Serde(expand(&document, &document)), needs_keys, style => STYLE };
        let page = page.render(whole).expect("a test renders it");
        Self { document: document.to_string().into(), page: page.into() }
    }
}

/// A part of the document with its references expanded.
fn expand(part: &Value, document: &Value) -> Value {
    match part {
        Value::Object(fields) => match fields.get("$ref").and_then(Value::as_str) {
            Some(reference) => expand(document.pointer(&reference[1..]).expect("a test follows all of them"), document),
            None => fields.iter().map(|(name, field)| (name.clone(), expand(field, document))).collect(),
        },
        Value::Array(parts) => parts.iter().map(|part| expand(part, document)).collect(),
        plain => plain.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use hostler_api::ServedBy;

    use super::*;

    #[test]
    fn the_api_document_names_its_version_and_key_requirement() {
        for (docs, security) in API_DOCS.iter().zip([json!([]), json!([{"key": []}])]) {
            let document: Value = serde_json::from_slice(&docs.document).unwrap();
            assert_eq!((&document["info"]["version"], &document["security"]), (&json!(env!("CARGO_PKG_VERSION")), &security));
        }
    }

    #[test]
    fn every_route_of_the_table_is_documented_and_no_other() {
        let document: Value = serde_json::from_str(SOURCE).unwrap();
        let described: BTreeSet<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        let expected = Route::all().filter(|route| route.served_by() != ServedBy::Operators).map(Route::path);
        let cancel = "/v1/responses/{id}/cancel";
        assert_eq!(described, expected.filter(|path| !path.is_empty()).chain([cancel]).collect());
    }

    #[test]
    fn the_api_page_lists_every_route_and_loads_nothing() {
        let [open, keyed] = [0, 1].map(|at| std::str::from_utf8(&API_DOCS[at].page).unwrap());
        let document: Value = serde_json::from_str(SOURCE).unwrap();
        for path in document["paths"].as_object().unwrap().keys() {
            let escaped = path.replace('/', "&#x2f;");
            assert!(open.contains(&format!("<code>{escaped}</code>")), "{path}");
        }
        for (name, kind) in
            [("x-hostler-priority", "integer"), ("messages", "list of object"), ("tool_choice", "none, auto, required or object")]
        {
            assert!(open.contains(&format!("<code>{name}</code>")) && open.contains(kind), "{name}");
        }
        assert!(keyed.contains("authorization: Bearer") && !open.contains("authorization: Bearer"));
        for odd in ["<script", "src=", "http:", "https:", "undefined"] {
            assert!(!keyed.contains(odd), "{odd}");
        }
    }
}
