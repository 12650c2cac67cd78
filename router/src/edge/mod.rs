//! The OpenAI-compatible edge: accepts connections and answers requests, mostly with engines'
//! answers.

mod api_docs;
mod awaited_answer;
mod chat_fallback;
mod connections;
mod error_forms;
mod framing;
mod grpc;
mod head_checks;
mod held_stream;
mod local_replies;
mod messages_translator;
mod ollama;
mod ollama_translator;
mod parser_refusals;
mod reply;
mod responses_translator;
mod routes;
mod translation;

pub(crate) use connections::{EdgeListeners, serve, serve_in_memory};

#[cfg(test)]
mod tests;
