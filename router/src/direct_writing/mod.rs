//! Direct writing of events (docs/decisions/0010): the lane's task writes a piece of a stream to the client itself while the relay waits for it.
//!
//! The edge gives a plain HTTP/1.1 connection's `Outlet` to the answer (`Relay::enable_direct_writing`); from the first event on, the relay attaches the
//! `AnswerPipeline` to the lane's inbox as its `InlineConsumer`. The inbox hands each piece to it on the lane's task; the pipeline reads the piece as the
//! relay would, and writes it through the outlet if nothing lies before it there. Otherwise the relay takes it.

mod outlet;
mod pipeline;

pub(crate) use outlet::{ClientStream, DirectWriter};
pub(crate) use pipeline::AnswerPipeline;
