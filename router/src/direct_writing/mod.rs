//! Direct writing of events (docs/decisions/0010): while the relay waits for a piece of a stream,
//! the lane's task writes it to the client itself.
//!
//! The edge gives a plain HTTP/1.1 connection's `DirectWriter` to the answer
//! (`Relay::enable_direct_writing`). From the first event on, the relay attaches the
//! `AnswerPipeline` to the lane's inbox as its `InlineConsumer`. The inbox hands each piece to it
//! on the lane's task. The pipeline reads the piece as the relay would, and writes it through the
//! direct writer if nothing is ahead of it there. Otherwise the relay takes it.

mod direct_writer;
mod pipeline;

pub(crate) use direct_writer::{ClientStream, DirectWriter};
pub(crate) use pipeline::AnswerPipeline;
