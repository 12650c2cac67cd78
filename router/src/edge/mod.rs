//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

pub mod access_log;
mod request_body;
mod connection_clock;
mod connections;
mod body_format;
mod form;
mod framing;
mod grpc;
mod head_checks;
mod headers;
mod ids;
mod invocation;
mod isolation;
mod media;
mod ollama;
mod direct_writer;
mod local_replies;
mod peek;
mod reply;
mod routes;
mod stored_responses;
mod submit;
mod work_estimate;

pub use request_body::BodyMemory;
pub(crate) use request_body::BodyReadError;
pub use connections::serve;
pub use isolation::Isolation;
pub(crate) use isolation::default_secret_path as usual_secret;
pub use media::{MediaHosts, InvalidMediaHost};
pub(crate) use direct_writer::DirectWriter;
pub use routes::Edge;
pub(crate) use submit::{Rejection, InboundRequest};

#[cfg(test)]
mod tests;
