//! Whole-system tests: the real run functions over simulated engines, each theme in a file of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod cli;
mod docs;
mod drains;
mod faults;
mod fidelity;
mod gpus;
mod harness;
mod keeper;
mod lanes;
mod learning;
mod lifetimes;
mod operators;
mod pages;
mod placement;
mod poison;
mod refusals;
mod restarts;
mod routers;
