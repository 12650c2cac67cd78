//! Names of spans and their attributes: OpenTelemetry's semantic conventions for generative AI and
//! for HTTP servers, and `hostler.*` for the rest. docs/traces.md lists them.

use hostler_api::Route;
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

/// Methods of the gRPC service, each a route of its own.
const GRPC_METHODS: [&str; 6] = [
    "/hostler.inference.v1.Inference/Generate",
    "/hostler.inference.v1.Inference/GenerateStream",
    "/hostler.inference.v1.Inference/Embed",
    "/hostler.inference.v1.Inference/ListModels",
    "/hostler.inference.v1.Inference/Place",
    "/hostler.inference.v1.Inference/Release",
];

/// The route of a path, from a bounded set. Any other path is a client's own text.
pub(super) fn route(path: &str) -> Option<&'static str> {
    let grpc = || GRPC_METHODS.into_iter().find(|method| *method == path);
    Some(Route::of(path).path()).filter(|route| !route.is_empty()).or_else(grpc)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_name_is_one_of_few_whatever_clients_request() {
        assert_eq!(route("/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(route("/v1/responses/resp_1/cancel"), Some("/v1/responses/{id}"));
        assert_eq!(route("/v1/models/org/model"), Some("/v1/models/{id}"));
        assert_eq!((route("/v1/chat/completions/"), route("/made/up"), route("")), (None, None, None));
        assert!(GRPC_METHODS.iter().all(|method| route(method) == Some(method)));
    }

    #[test]
    fn a_method_name_is_one_of_the_standards() {
        assert_eq!((method(&Method::PATCH), method(&Method::from_bytes(b"MADEUP").unwrap())), ("PATCH", "_OTHER"));
    }
}
