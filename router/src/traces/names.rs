//! Names of spans and their attributes: OpenTelemetry's semantic conventions for generative AI and
//! for HTTP servers, and `hostler.*` for the rest. docs/traces.md lists them.

use http::Method;

pub(super) const METHOD: &str = "http.request.method";
pub(super) const ROUTE: &str = "http.route";
pub(super) const PATH: &str = "url.path";
pub(super) const STATUS: &str = "http.response.status_code";
pub(super) const ERROR: &str = "error.type";

pub(super) const OPERATION: &str = "gen_ai.operation.name";
pub(super) const PROVIDER: &str = "gen_ai.provider.name";
pub(super) const MODEL: &str = "gen_ai.request.model";
pub(super) const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub(super) const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
pub(super) const CACHED_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
pub(super) const FIRST_CHUNK_SECONDS: &str = "gen_ai.response.time_to_first_chunk";

pub(super) const REQUEST_ID: &str = "hostler.request.id";
pub(super) const CLIENT_ID: &str = "hostler.client_id";
pub(super) const KEY: &str = "hostler.key";
pub(super) const TENANT: &str = "hostler.tenant";
pub(super) const OUTCOME: &str = "hostler.outcome";
pub(super) const ATTEMPTS: &str = "hostler.attempts";
pub(super) const RESUMED: &str = "hostler.resumed";
pub(super) const BYTES: &str = "hostler.bytes";
pub(super) const ATTEMPT: &str = "hostler.attempt";
pub(super) const REPLICA: &str = "hostler.replica";
pub(super) const REASON: &str = "hostler.placement.reason";
pub(super) const CANDIDATES: &str = "hostler.placement.candidates";
pub(super) const CACHE_LEVEL: &str = "hostler.placement.cache_level";
pub(super) const PROMPT_TOKENS: &str = "hostler.placement.prompt_tokens";
pub(super) const CACHED_TOKENS: &str = "hostler.placement.cached_tokens";
pub(super) const UNCACHED_TOKENS: &str = "hostler.placement.uncached_tokens";
pub(super) const PREDICTED_SECONDS: &str = "hostler.placement.predicted_first_token_seconds";

/// Spans within a request.
pub(super) const ADMISSION: &str = "admission";
pub(super) const PLACEMENT: &str = "placement";
pub(super) const QUEUE: &str = "queue";

/// Events.
pub(super) const FIRST_TOKEN: &str = "first_token";
pub(super) const RESUMPTION: &str = "resumption";

/// The kind of engine, for `gen_ai.provider.name`.
pub(super) const VLLM: &str = "vllm";

/// The `error.type` of an attempt that was lost without a known reason.
pub(super) const GIVEN_UP: &str = "given_up";

/// Routes that may name a span. Any other path is a client's own text, of unbounded variety.
const ROUTES: [&str; 36] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/invocations",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/version",
    "/load",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/tags",
    "/api/show",
    "/hostler.inference.v1.Inference/Generate",
    "/hostler.inference.v1.Inference/GenerateStream",
    "/hostler.inference.v1.Inference/Embed",
    "/hostler.inference.v1.Inference/ListModels",
    "/hostler.inference.v1.Inference/Place",
    "/hostler.inference.v1.Inference/Release",
];

/// Routes with named resources below them.
const NAMED: [(&str, &str); 2] = [("/v1/responses/", "/v1/responses/{id}"), ("/v1/models/", "/v1/models/{id}")];

/// The route of a path, from a bounded set.
pub(super) fn route(path: &str) -> Option<&'static str> {
    let named = || NAMED.iter().find(|(beginning, _)| path.starts_with(beginning)).map(|(_, route)| *route);
    ROUTES.iter().find(|route| **route == path).copied().or_else(named)
}

/// A method, or the convention's word for an unknown one.
pub(super) fn method(method: &Method) -> &'static str {
    const KNOWN: [Method; 9] = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::HEAD,
        Method::OPTIONS,
        Method::PATCH,
        Method::CONNECT,
        Method::TRACE,
    ];
    const NAMES: [&str; 9] = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE"];
    KNOWN.iter().position(|known| known == method).map_or("_OTHER", |at| NAMES[at])
}

/// The operation of a request to an engine's path, if the convention has a word for it.
pub(super) fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" | "/v1/responses" | "/v1/messages" | "/cohere/v2/chat" => Some("chat"),
        "/v1/completions" | "/inference/v1/generate" => Some("text_completion"),
        "/v1/embeddings" | "/v2/embed" => Some("embeddings"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_name_is_one_of_few_whatever_clients_request() {
        assert_eq!(route("/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(route("/v1/responses/resp_1/cancel"), Some("/v1/responses/{id}"));
        assert_eq!(route("/v1/models/org/model"), Some("/v1/models/{id}"));
        assert_eq!((route("/v1/chat/completions/"), route("/made/up"), route("")), (None, None, None));
        assert!(ROUTES.iter().all(|known| route(known) == Some(known)));
    }

    #[test]
    fn a_method_name_is_one_of_the_standards() {
        assert_eq!((method(&Method::PATCH), method(&Method::from_bytes(b"MADEUP").unwrap())), ("PATCH", "_OTHER"));
    }
}
