//! Choice of a replica for each request, with the reasons.
//!
//! Everything here is a pure function or a plain data structure: no task, no clock, no socket. Time
//! and randomness are arguments, so the router, the tests and the simulator run the same code.

pub mod affinity;
pub mod block_keys;
pub mod cost;
pub mod offered_work;
pub mod output_lengths;
pub mod queue;
pub mod rates;
