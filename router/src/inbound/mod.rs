//! The way of every request into the fleet, whatever API it came by: its body is read within bounds, it is peeked at, admitted and dispatched.

mod body;
mod content;
mod edge;
mod form;
pub(crate) mod headers;
mod ids;
mod invocation;
mod isolation;
mod media;
mod peek;
mod request;
mod share;
mod state;
mod submit;
mod work;

pub use body::Reading;
#[cfg(test)]
pub(crate) use body::NoRoom;
pub(crate) use body::{NotInflated, Unread};
pub use edge::Edge;
pub use isolation::Isolation;
pub use media::{MediaHosts, NoHost};
pub(crate) use request::{Declined, Inquiry};

#[cfg(test)]
mod tests;
