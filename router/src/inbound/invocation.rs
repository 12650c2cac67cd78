//! `/invocations`, SageMaker's one route for every request, treated like the route of the request
//! that it carries.
//!
//! As in vLLM 0.32, the body decides which request it is: the first of chat, completion and the
//! others that fits. Only a header names the model. The body's model is ignored, and without the
//! header an engine takes its own first model.
//!
//! vLLM's Rust front-end lacks the route. An engine with it gets the carried request on that
//! request's own route.

use hostler_api::Route;
use http::HeaderMap;
use serde_json::{Map, Value};

use super::peek::{Peek, peek};

/// The path as messages show it.
const PATH: &str = Route::Invocations.path();

/// The header that names the model, which need not be an adapter.
pub(super) const ADAPTER_HEADER: &str = "x-amzn-sagemaker-adapter-identifier";

/// The route that a request is effectively for. An invocation that is neither chat nor completion
/// generates nothing: it is embedded, classified or scored, which are the same to the router.
pub(super) fn effective_route(route: Route, peek: &Peek) -> Route {
    match route {
        Route::Invocations if peek.is_chat => Route::ChatCompletions,
        Route::Invocations if peek.is_completion => Route::Completions,
        Route::Invocations => Route::Pooling,
        route => route,
    }
}

/// The model that engines use for a request of this path, if it is an invocation that names one.
///
/// # Errors
/// If two models are named; the message is for the client.
pub(super) fn model_from_header(route: Route, headers: &HeaderMap) -> Result<Option<String>, String> {
    if route != Route::Invocations {
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
pub(super) fn carried_request(route: Route, headers: &HeaderMap, body: &[u8]) -> Option<(Route, String)> {
    let carried = effective_route(route, &peek(body).ok()?);
    if route != Route::Invocations || !matches!(carried, Route::ChatCompletions | Route::Completions) {
        return None;
    }
    let mut fields: Map<String, Value> = serde_json::from_slice(body).ok()?;
    if let Some(model) = model_from_header(route, headers).ok()? {
        fields.insert("model".to_owned(), model.into());
    }
    Some((carried, Value::Object(fields).to_string()))
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
        for (route, body, expected) in [
            (Route::Invocations, r#"{"messages":[],"prompt":"x"}"#, Route::ChatCompletions),
            (Route::Invocations, r#"{"m\u0065ssages":7}"#, Route::ChatCompletions),
            (Route::Invocations, r#"{"prompt":"x"}"#, Route::Completions),
            (Route::Invocations, r#"{"prompt_\u0065mbeds":"x"}"#, Route::Completions),
            (Route::Invocations, r#"{"prompt":null,"input":"x"}"#, Route::Completions),
            (Route::Invocations, r#"{"input":"x"}"#, Route::Pooling),
            (Route::Invocations, r#"{"query":"x","documents":["prompt"]}"#, Route::Pooling),
            (Route::Embeddings, r#"{"messages":[]}"#, Route::Embeddings),
        ] {
            assert_eq!(effective_route(route, &peek(body.as_bytes()).unwrap()), expected, "{body}");
        }
    }

    #[test]
    fn an_invocation_names_its_model_in_one_header() {
        let read = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(ADAPTER_HEADER, value.parse().unwrap());
            }
            model_from_header(Route::Invocations, &headers)
        };
        assert_eq!((read(&[]), read(&[""]), read(&["m"])), (Ok(None), Ok(None), Ok(Some("m".into()))));
        assert!(read(&["m", "m"]).is_err() && read(&["m\u{e9}"]).is_err());
    }
}
