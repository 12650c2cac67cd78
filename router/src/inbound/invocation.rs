//! `/invocations`, SageMaker's one route for every request, treated like the route of the request
//! that it carries.
//!
//! As in vLLM 0.32, the body decides which request it is: the first of chat, completion and the
//! others that fits. Only a header names the model. The body's model is ignored, and without the
//! header an engine takes its own first model.
//!
//! vLLM's Rust front-end lacks the route. An engine with it gets the carried request on that
//! request's own route.

use http::HeaderMap;
use serde_json::{Map, Value};

use super::peek::{Peek, peek};

pub(crate) const PATH: &str = "/invocations";

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The header that names the model, which need not be an adapter.
pub(super) const ADAPTER_HEADER: &str = "x-amzn-sagemaker-adapter-identifier";

/// The route that a request is effectively for. An invocation that is neither chat nor completion
/// generates nothing: it is embedded, classified or scored, which are the same to the router.
pub(super) fn effective_route<'a>(path: &'a str, peek: &Peek<'_>) -> &'a str {
    match path {
        PATH if peek.is_chat => CHAT,
        PATH if peek.is_completion => COMPLETIONS,
        PATH => "/pooling",
        path => path,
    }
}

/// The model that engines use for a request of this path, if it is an invocation that names one.
///
/// # Errors
/// If two models are named; the message is for the client.
pub(super) fn model_from_header(path: &str, headers: &HeaderMap) -> Result<Option<String>, String> {
    if path != PATH {
        return Ok(None);
    }
    let mut named = headers.get_all(ADAPTER_HEADER).iter();
    match (named.next().map(|model| model.to_str()), named.next()) {
        (None, _) => Ok(None),
        (Some(Ok(model)), None) => Ok(Some(model.to_owned()).filter(|model| !model.is_empty())),
        _ => Err(format!("`{PATH}` takes its model from one header `{ADAPTER_HEADER}`, in ASCII")),
    }
}

/// The route and body of the chat or completion that an invocation carries, with the model of its
/// header, else of its body. `None` for any other request.
pub(super) fn carried_request(path: &str, headers: &HeaderMap, body: &[u8]) -> Option<(&'static str, String)> {
    let route = match effective_route(path, &peek(body).ok()?) {
        _ if path != PATH => return None,
        CHAT => CHAT,
        COMPLETIONS => COMPLETIONS,
        _ => return None,
    };
    let mut fields: Map<String, Value> = serde_json::from_slice(body).ok()?;
    if let Some(model) = model_from_header(path, headers).ok()? {
        fields.insert("model".to_owned(), model.into());
    }
    Some((route, Value::Object(fields).to_string()))
}

/// The message for a caller that may not use all models and names none where engines look.
pub(super) fn missing_model_message() -> String {
    format!(
        "engines take the model of `{PATH}` from the header `{ADAPTER_HEADER}`, not from the body: say there which, since this key is for some models only"
    )
}

#[cfg(test)]
mod tests {
    use super::super::peek::peek;
    use super::*;

    #[test]
    fn the_body_decides_what_an_invocation_carries() {
        for (path, body, expected) in [
            (PATH, r#"{"messages":[],"prompt":"x"}"#, "/v1/chat/completions"),
            (PATH, r#"{"m\u0065ssages":7}"#, "/v1/chat/completions"),
            (PATH, r#"{"prompt":"x"}"#, "/v1/completions"),
            (PATH, r#"{"prompt_\u0065mbeds":"x"}"#, "/v1/completions"),
            (PATH, r#"{"prompt":null,"input":"x"}"#, "/v1/completions"),
            (PATH, r#"{"input":"x"}"#, "/pooling"),
            (PATH, r#"{"query":"x","documents":["prompt"]}"#, "/pooling"),
            ("/v1/embeddings", r#"{"messages":[]}"#, "/v1/embeddings"),
        ] {
            assert_eq!(effective_route(path, &peek(body.as_bytes()).unwrap()), expected, "{path} {body}");
        }
    }

    #[test]
    fn an_invocation_names_its_model_in_one_header() {
        let read = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(ADAPTER_HEADER, value.parse().unwrap());
            }
            model_from_header(PATH, &headers)
        };
        assert_eq!((read(&[]), read(&[""]), read(&["m"])), (Ok(None), Ok(None), Ok(Some("m".into()))));
        assert!(read(&["m", "m"]).is_err() && read(&["m\u{e9}"]).is_err());
    }
}
