//! Whole-system tests: the real run functions over simulated engines, each theme in a file of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod access;
mod admission;
mod bench;
mod billing;
mod bodies;
mod cli;
mod crash_suspects;
mod docs;
mod drains;
mod edge_tls;
mod failover;
mod faults;
mod fidelity;
mod front_ends;
mod gpus;
mod harness;
mod inference;
mod isolation;
mod jobs;
mod joining;
mod keep_alives;
mod keeper;
mod keys;
mod lanes;
mod learning;
mod leaving;
mod lifetimes;
mod ollama;
mod operators;
mod operators_access;
mod pages;
mod placement;
mod readings;
mod refusals;
mod restarts;
mod resumption;
mod routers;
mod scale;
mod secrecy;
mod sessions;
mod shared_hosts;
mod stored_responses;
mod takeover;
mod web_pages;
