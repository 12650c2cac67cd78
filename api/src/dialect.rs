//! The differences between the event streams of the routes.

use bytes::Bytes;

/// How event streams of a route end and fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions` and `/v1/completions`: a finish reason, then `[DONE]`.
    OpenAi,
    /// `/v1/responses`: ends with a `response.completed`, `.incomplete` or `.failed` event.
    Responses,
    /// `/v1/messages`: ends with `message_stop`.
    Anthropic,
    /// Any other event stream: complete when it ends.
    Other,
}

impl Dialect {
    /// Bytes in every event with new tokens. Front-ends send other events before they have any.
    pub fn token_marker(self) -> &'static [u8] {
        match self {
            Self::OpenAi | Self::Other => b"\n\n",
            Self::Responses => b".delta\n",
            Self::Anthropic => b"event: content_block_delta",
        }
    }

    /// Whether an event of this name ends a complete answer.
    pub fn is_final_event(self, name: &[u8]) -> bool {
        match self {
            Self::Responses => matches!(name, b"response.completed" | b"response.incomplete" | b"response.failed"),
            Self::Anthropic => name == b"message_stop",
            Self::OpenAi | Self::Other => false,
        }
    }

    pub fn has_usage_field(self, name: &[u8]) -> bool {
        match self {
            Self::Responses => self.is_final_event(name),
            Self::Anthropic => matches!(name, b"message_start" | b"message_delta"),
            Self::OpenAi | Self::Other => true,
        }
    }

    /// The fields with generated text, each up to its first quote of text.
    pub fn text_fields(self) -> &'static [&'static [u8]] {
        match self {
            Self::OpenAi => &[br#""content":""#, br#""text":""#, br#""reasoning":""#, br#""reasoning_content":""#, br#""arguments":""#],
            Self::Responses => &[br#""delta":""#],
            Self::Anthropic => &[br#""text":""#, br#""thinking":""#, br#""partial_json":""#],
            Self::Other => &[],
        }
    }

    /// The field of an event that may hold the usage, if not the event itself.
    pub fn nested_field(self) -> &'static str {
        match self {
            Self::OpenAi => "",
            Self::Responses => "response",
            Self::Anthropic => "message",
            // The Cohere API has the usage in `delta`.
            Self::Other => "delta",
        }
    }

    /// Bytes that keep a stream's connection alive while there is no event.
    #[must_use]
    pub fn keep_alive(self) -> Bytes {
        Bytes::from_static(match self {
            Self::Anthropic => b"event: ping\ndata: {\"type\": \"ping\"}\n\n",
            Self::OpenAi | Self::Responses | Self::Other => b": keep-alive\n\n",
        })
    }

    /// The event that tells a client that its answer has failed.
    #[must_use]
    pub fn error_event(self, message: &str) -> Bytes {
        let (event, data) = match self {
            Self::OpenAi | Self::Other => {
                ("", serde_json::json!({"error": {"message": message, "type": "InternalServerError", "param": null, "code": 502}}))
            }
            Self::Responses => {
                ("event: error\n", serde_json::json!({"type": "error", "code": "server_error", "message": message, "param": null}))
            }
            Self::Anthropic => ("event: error\n", serde_json::json!({"type": "error", "error": {"type": "api_error", "message": message}})),
        };
        format!("{event}data: {data}\n\n").into()
    }
}
