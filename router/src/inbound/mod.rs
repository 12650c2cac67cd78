//! The way of every request into the fleet, for all APIs: its body is read within bounds and peeked
//! at, then the request is admitted and dispatched.

mod allowed_origins;
mod body;
mod body_format;
mod edge;
mod form;
pub(crate) mod headers;
mod ids;
mod invocation;
mod isolation;
mod media;
mod peek;
mod reading;
mod request;
mod required_engine;
mod resume_choice;
mod share;
mod submit;
mod work_estimate;

pub(crate) use allowed_origins::{AllowedOrigins, InvalidOrigin};
pub(crate) use allowed_origins::{PageAccess, allow_preflight, is_preflight};
pub(crate) use body::{BodyMemory, BodyMemoryFull, BodyReadError, BodyReservation, InflateError, SHORT_BODY_BYTES, read_plain};
pub(crate) use edge::Edge;
pub(crate) use headers::Explanation;
pub(crate) use isolation::Isolation;
pub(crate) use media::{InvalidMediaHost, MediaHosts};
pub(crate) use request::{InboundRequest, Prepared, Rejection};
pub(crate) use share::owner_share;

#[cfg(test)]
mod tests;
