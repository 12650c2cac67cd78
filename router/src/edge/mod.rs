//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

mod connection_clock;
mod connections;
mod error_forms;
mod framing;
mod grpc;
mod head_checks;
mod held_stream;
mod local_replies;
mod ollama;
mod ollama_translator;
mod parser_refusals;
mod reply;
mod routes;

pub use connections::serve;
