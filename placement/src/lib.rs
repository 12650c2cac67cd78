//! Which replica a request goes to, and why. Everything here is a pure function or a plain data structure: no task, no clock, no socket;
//! time and randomness are arguments. So the router, the tests and the simulator run the same code.

pub mod affinity;
pub mod block_keys;
pub mod cost;
pub mod offered_work;
pub mod output_lengths;
pub mod queue;
pub mod rates;
