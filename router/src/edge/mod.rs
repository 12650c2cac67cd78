//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

mod clock;
mod connections;
mod framing;
mod grpc;
mod head;
mod ollama;
mod ollama_translator;
mod own;
mod reply;
mod routes;

pub use connections::serve;
