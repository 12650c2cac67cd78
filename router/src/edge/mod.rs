//! The OpenAI-compatible edge: accepts connections and answers requests, most of them with what an engine says.

mod clock;
mod connections;
mod framing;
mod headers;
mod peek;
mod reply;
mod routes;
mod submit;

pub use connections::serve;
pub use routes::Edge;

#[cfg(test)]
mod tests;
