//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

mod chat_fallback;
mod connection_clock;
mod connections;
mod framing;
mod grpc;
mod head_checks;
mod local_replies;
mod messages_translator;
mod ollama;
mod ollama_translator;
mod reply;
mod responses_translator;
mod routes;
mod translation;

pub use connections::serve;
