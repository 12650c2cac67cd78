//! Measurement of an OpenAI endpoint, or of several beside each other under the same load: what
//! users would wait, what the endpoint delivers, and where its limit is.
//!
//! A [`workload`] decides which conversations there are and when they begin, the `drive` has them
//! with a `target`, and each request leaves a [`sample`]. [`figures`] are computed from all samples
//! of a load, and [`report`] shows them.

mod args;
mod client;
mod drive;
mod error;
mod events;
pub mod figures;
mod fleet;
pub mod progress;
mod record;
pub mod report;
pub mod sample;
pub mod session;
mod sweep;
mod target;
pub mod workload;

pub use args::{Api, BenchArgs, CommonArgs};
pub use client::{Call, Client, ClientError, WholeAnswer};
pub use drive::run;
pub use error::Error;
pub use target::Target;
