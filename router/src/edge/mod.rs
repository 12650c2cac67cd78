//! The OpenAI-compatible edge: accepts connections and answers requests, mostly with engines'
//! answers.

mod api_docs;
mod awaited_answer;
mod batch_routes;
mod chat_fallback;
mod connections;
mod error_forms;
mod file_body;
mod framing;
mod grpc;
mod head_checks;
mod held_stream;
mod local_replies;
mod messages_translator;
mod ollama;
mod ollama_translator;
mod own_requests;
mod parser_refusals;
mod reply;
mod responses_translator;
mod routes;
mod translation;

pub(crate) use connections::{EdgeListeners, serve, serve_in_memory};
pub(crate) use own_requests::NoAnswer;

#[cfg(test)]
mod tests;
