//! The table of routes: one row each, with all that differs between them. A new route is a variant
//! of [`Route`] and a row; a variant without a row does not compile.

use strum::EnumCount;

use crate::Dialect;

/// A route of the edge, or the kind of path that several share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumCount)]
pub enum Route {
    ChatCompletions,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    ChatBatch,
    ChatRender,
    CompletionRender,
    SystemOne,
    ScoreV1,
    RerankV1,
    RerankV2,
    EmbedV2,
    Transcriptions,
    Translations,
    Score,
    Rerank,
    Pooling,
    Classify,
    GenerativeScoring,
    Generate,
    CohereChat,
    CohereRender,
    Invocations,
    Tokenize,
    Detokenize,
    TokenizerInfo,
    Version,
    /// Loads an adapter into one engine.
    LoadAdapter,
    UnloadAdapter,
    Models,
    Health,
    Ping,
    Healthz,
    Readyz,
    Livez,
    Load,
    OpenApi,
    Docs,
    /// Files of the Batch API.
    Files,
    Batches,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaTags,
    OllamaShow,
    OllamaPs,
    OllamaVersion,
    /// A response that an engine keeps, and what is below it.
    StoredResponse,
    Model,
    File,
    FileContent,
    Batch,
    CancelBatch,
    /// Any other path that shows what a request becomes, without computing it.
    Rendering,
    /// Any other path. Engines have more below `/v1/` and `/v2/`.
    Other,
}

/// The party that answers a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServedBy {
    /// An engine; the router passes the request on.
    Engine,
    /// An engine, for operators alone: it would change one replica behind the back of all routers.
    Operators,
    /// The router itself.
    Router,
    /// The router, as Ollama does: it asks an engine on another route where the request needs one.
    Ollama,
}

/// The work of a route on the accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Nothing,
    /// Prompts alone: embeddings, scores, classes.
    Pooled,
    /// Prompts, and answers token by token.
    Generated(Prompts),
}

/// How many prompts a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prompts {
    One,
    /// As many as its `prompt` lists.
    OfCompletion,
    /// As many as its `messages` lists.
    OfChats,
    /// As many as its body has room for: a sound is computed in pieces.
    OfSound,
    /// One, computed again in each turn with the engine's own tools.
    InTurns,
}

/// All that differs between routes.
#[derive(Debug, Clone, Copy)]
struct Row {
    route: Route,
    /// The path; a part in braces stands for any text.
    path: &'static str,
    served_by: ServedBy,
    work: Work,
    dialect: Dialect,
    /// OpenTelemetry's word for what it does, `gen_ai.operation.name`.
    operation: Option<&'static str>,
    /// The route for tenants that are kept apart, where requests of this one have no `cache_salt`
    /// (vLLM 0.32).
    salted_substitute: Option<Route>,
    /// A release of vLLM's Rust front-end lacks it.
    may_be_missing: bool,
}

impl Row {
    const fn new(route: Route, path: &'static str, served_by: ServedBy, work: Work) -> Self {
        let may_be_missing = matches!(served_by, ServedBy::Engine);
        Self { route, path, served_by, work, dialect: Dialect::Other, operation: None, salted_substitute: None, may_be_missing }
    }

    const fn engine(route: Route, path: &'static str, work: Work) -> Self {
        Self::new(route, path, ServedBy::Engine, work)
    }

    const fn generation(route: Route, path: &'static str, prompts: Prompts) -> Self {
        Self::engine(route, path, Work::Generated(prompts))
    }

    const fn pooled(route: Route, path: &'static str) -> Self {
        Self::engine(route, path, Work::Pooled)
    }

    /// Answered by an engine's front-end without its core.
    const fn free(route: Route, path: &'static str) -> Self {
        Self::engine(route, path, Work::Nothing)
    }

    const fn router(route: Route, path: &'static str) -> Self {
        Self::new(route, path, ServedBy::Router, Work::Nothing)
    }

    const fn ollama(route: Route, path: &'static str) -> Self {
        Self::new(route, path, ServedBy::Ollama, Work::Nothing)
    }

    const fn streams(self, dialect: Dialect) -> Self {
        Self { dialect, ..self }
    }

    const fn operation(self, operation: &'static str) -> Self {
        Self { operation: Some(operation), ..self }
    }

    const fn unsalted(self, substitute: Route) -> Self {
        Self { salted_substitute: Some(substitute), ..self }
    }

    /// Both of vLLM's front-ends have it, in every release that agents start.
    const fn everywhere(self) -> Self {
        Self { may_be_missing: false, ..self }
    }
}

const TABLE: [Row; Route::COUNT] = {
    use Prompts::{InTurns, OfChats, OfCompletion, OfSound, One};
    [
        Row::generation(Route::ChatCompletions, "/v1/chat/completions", One).streams(Dialect::OpenAi).operation("chat").everywhere(),
        Row::generation(Route::Completions, "/v1/completions", OfCompletion)
            .streams(Dialect::OpenAi)
            .operation("text_completion")
            .everywhere(),
        Row::generation(Route::Responses, "/v1/responses", InTurns).streams(Dialect::Responses).operation("chat"),
        Row::generation(Route::Messages, "/v1/messages", One).streams(Dialect::Anthropic).operation("chat"),
        // A front-end that lacks it lacks messages too, and both are stood for by a chat.
        Row::free(Route::CountTokens, "/v1/messages/count_tokens").everywhere(),
        Row::pooled(Route::Embeddings, "/v1/embeddings").operation("embeddings"),
        Row::generation(Route::ChatBatch, "/v1/chat/completions/batch", OfChats),
        Row::free(Route::ChatRender, "/v1/chat/completions/render"),
        Row::free(Route::CompletionRender, "/v1/completions/render"),
        Row::pooled(Route::SystemOne, "/v1/systemone"),
        Row::pooled(Route::ScoreV1, "/v1/score"),
        Row::pooled(Route::RerankV1, "/v1/rerank"),
        Row::pooled(Route::RerankV2, "/v2/rerank"),
        Row::pooled(Route::EmbedV2, "/v2/embed").operation("embeddings").unsalted(Route::Embeddings),
        Row::generation(Route::Transcriptions, "/v1/audio/transcriptions", OfSound),
        Row::generation(Route::Translations, "/v1/audio/translations", OfSound),
        Row::pooled(Route::Score, "/score"),
        Row::pooled(Route::Rerank, "/rerank"),
        Row::pooled(Route::Pooling, "/pooling"),
        Row::pooled(Route::Classify, "/classify"),
        Row::pooled(Route::GenerativeScoring, "/generative_scoring"),
        Row::generation(Route::Generate, "/inference/v1/generate", One).operation("text_completion"),
        Row::generation(Route::CohereChat, "/cohere/v2/chat", One).operation("chat").unsalted(Route::ChatCompletions),
        Row::free(Route::CohereRender, "/cohere/v2/chat/render").everywhere(),
        // The body alone says which request it carries.
        Row::pooled(Route::Invocations, "/invocations"),
        Row::free(Route::Tokenize, "/tokenize").everywhere(),
        Row::free(Route::Detokenize, "/detokenize").everywhere(),
        Row::free(Route::TokenizerInfo, "/tokenizer_info"),
        Row::free(Route::Version, "/version").everywhere(),
        Row::new(Route::LoadAdapter, "/v1/load_lora_adapter", ServedBy::Operators, Work::Nothing),
        Row::new(Route::UnloadAdapter, "/v1/unload_lora_adapter", ServedBy::Operators, Work::Nothing),
        Row::router(Route::Models, "/v1/models"),
        Row::router(Route::Health, "/health"),
        Row::router(Route::Ping, "/ping"),
        Row::router(Route::Healthz, "/healthz"),
        Row::router(Route::Readyz, "/readyz"),
        Row::router(Route::Livez, "/livez"),
        Row::router(Route::Load, "/load"),
        Row::router(Route::OpenApi, "/openapi.json"),
        Row::router(Route::Docs, "/docs"),
        Row::router(Route::Files, "/v1/files"),
        Row::router(Route::Batches, "/v1/batches"),
        Row::ollama(Route::OllamaChat, "/api/chat"),
        Row::ollama(Route::OllamaGenerate, "/api/generate"),
        Row::ollama(Route::OllamaEmbed, "/api/embed"),
        Row::ollama(Route::OllamaEmbeddings, "/api/embeddings"),
        Row::ollama(Route::OllamaTags, "/api/tags"),
        Row::ollama(Route::OllamaShow, "/api/show"),
        Row::ollama(Route::OllamaPs, "/api/ps"),
        Row::ollama(Route::OllamaVersion, "/api/version"),
        Row::free(Route::StoredResponse, "/v1/responses/{id}").everywhere(),
        Row::router(Route::Model, "/v1/models/{id}"),
        Row::router(Route::File, "/v1/files/{id}"),
        Row::router(Route::FileContent, "/v1/files/{id}/content"),
        Row::router(Route::Batch, "/v1/batches/{id}"),
        Row::router(Route::CancelBatch, "/v1/batches/{id}/cancel"),
        Row::free(Route::Rendering, "").everywhere(),
        Row::pooled(Route::Other, "").everywhere(),
    ]
};

impl Route {
    /// The route of a path without its query. Which methods it takes is not looked at.
    #[must_use]
    pub fn of(path: &str) -> Self {
        let is_listed = |row: &&Row| row.path == path && !path.is_empty();
        if let Some(row) = TABLE.iter().find(is_listed) {
            return row.route;
        }
        match path {
            _ if path.starts_with("/v1/responses/") => Self::StoredResponse,
            _ if path.starts_with("/v1/models/") && path != "/v1/models/" => Self::Model,
            _ if path.starts_with("/v1/files/") => Self::below(&path["/v1/files/".len()..], (Self::File, Self::FileContent, "content")),
            _ if path.starts_with("/v1/batches/") => Self::below(&path["/v1/batches/".len()..], (Self::Batch, Self::CancelBatch, "cancel")),
            _ if path.ends_with("/render") || path.ends_with("/derender") => Self::Rendering,
            _ => Self::Other,
        }
    }

    /// The route of an id, or of the last part below it.
    fn below(path: &str, (object, part, name): (Self, Self, &str)) -> Self {
        match path.split_once('/') {
            None if !path.is_empty() => object,
            Some((id, rest)) if rest == name && !id.is_empty() => part,
            _ => Self::Other,
        }
    }

    /// All, in the order of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.route)
    }

    /// The path, where `{id}` stands for any text; empty for kinds of paths without a route.
    #[must_use]
    pub const fn path(self) -> &'static str {
        self.row().path
    }

    #[must_use]
    pub const fn served_by(self) -> ServedBy {
        self.row().served_by
    }

    #[must_use]
    pub const fn work(self) -> Work {
        self.row().work
    }

    /// How its event streams end and fail.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        self.row().dialect
    }

    /// OpenTelemetry's word for what it does, `gen_ai.operation.name`.
    #[must_use]
    pub const fn operation(self) -> Option<&'static str> {
        self.row().operation
    }

    /// The route for tenants that are kept apart, if requests of this one cannot be salted.
    #[must_use]
    pub const fn salted_substitute(self) -> Option<Self> {
        self.row().salted_substitute
    }

    /// Whether an engine that serves may lack it.
    #[must_use]
    pub const fn may_be_missing(self) -> bool {
        self.row().may_be_missing
    }

    const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_route_has_its_own_row_and_path() {
        for (number, row) in TABLE.iter().enumerate() {
            assert_eq!(row.route as usize, number, "{:?}", row.route);
            let is_pattern = row.path.is_empty() || row.path.contains('{');
            assert!(is_pattern || Route::of(row.path) == row.route, "{}", row.path);
        }
    }

    #[test]
    fn a_path_below_a_route_has_the_route_of_its_kind() {
        for (path, route) in [
            ("/v1/responses/resp_1/cancel", Route::StoredResponse),
            ("/v1/models/org/model", Route::Model),
            ("/v1/models/", Route::Other),
            ("/v1/files/file-1", Route::File),
            ("/v1/files/file-1/content", Route::FileContent),
            ("/v1/files/file-1/", Route::Other),
            ("/v1/batches/batch_1/cancel", Route::CancelBatch),
            ("/v1/batches//cancel", Route::Other),
            ("/v1/embeddings/render", Route::Rendering),
            ("/v1/chat/completions/", Route::Other),
            ("/made/up", Route::Other),
            ("", Route::Other),
        ] {
            assert_eq!(Route::of(path), route, "{path}");
        }
    }

    #[test]
    fn a_salted_substitute_is_a_route_that_can_be_salted() {
        for route in Route::all() {
            assert!(route.salted_substitute().is_none_or(|other| other.salted_substitute().is_none()), "{route:?}");
        }
    }
}
