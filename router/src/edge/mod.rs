//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

pub mod access_log;
mod body_format;
mod connection_clock;
mod connections;
mod direct_writer;
mod form;
mod framing;
mod grpc;
mod head_checks;
mod headers;
mod ids;
mod invocation;
mod isolation;
mod local_replies;
mod media;
mod ollama;
mod peek;
mod reply;
mod request_body;
mod routes;
mod stored_responses;
mod submit;
mod work_estimate;

pub use connections::serve;
pub(crate) use direct_writer::DirectWriter;
pub use isolation::Isolation;
pub(crate) use isolation::default_secret_path as usual_secret;
pub use media::{InvalidMediaHost, MediaHosts};
pub use request_body::BodyMemory;
pub(crate) use request_body::BodyReadError;
pub use routes::Edge;
pub(crate) use submit::{InboundRequest, Rejection};

#[cfg(test)]
mod tests;
