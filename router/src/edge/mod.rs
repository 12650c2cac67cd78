//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

mod body;
mod clock;
mod connections;
mod content;
mod form;
mod framing;
mod grpc;
mod head;
mod headers;
mod ids;
mod invocation;
mod isolation;
mod media;
mod ollama;
mod own;
mod peek;
mod reply;
mod routes;
mod state;
mod submit;
mod work;

pub use body::Reading;
pub(crate) use body::Unread;
pub use connections::serve;
pub use isolation::Isolation;
pub use media::{MediaHosts, NoHost};
pub use routes::Edge;
pub(crate) use submit::{Declined, Inquiry};

#[cfg(test)]
mod tests;
