//! Keeps the tokenizer of every model here and compared with an engine: asks agents again for files
//! that did not arrive, and has encoders proved as soon as an engine is ready. Where no encoder will
//! read all prompts, it finds out whether the engine says their tokens.

use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashSet;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::fleet::{Fleet, Replica};
use crate::prompt::{EncoderStatus, Prompts};

/// How often the fleet is checked for new prompt files. Until a model's encoder is proved, its
/// requests are placed by their text.
const SCAN_INTERVAL: Duration = Duration::from_millis(100);

const MAX_CONCURRENT_PROOFS: usize = 16;

/// Runs until `end`.
pub(crate) async fn maintain_tokenizers(prompts: Prompts, fleet: Fleet, end: CancellationToken) {
    // Dropping this task aborts the proofs.
    let mut proofs = JoinSet::new();
    let scanning = async {
        loop {
            scan_fleet(&prompts, &fleet, &mut proofs);
            sleep(SCAN_INTERVAL).await;
            while proofs.try_join_next().is_some() {}
        }
    };
    tokio::select! {
        () = scanning => {}
        () = end.cancelled() => {}
    }
}

fn scan_fleet(prompts: &Prompts, fleet: &Fleet, proofs: &mut JoinSet<()>) {
    let view = fleet.view().clone();
    let mut seen = FxHashSet::default();
    for replica in view.replicas.iter().filter(|replica| replica.is_ready()) {
        probe_rendering(prompts, replica, proofs);
        let Some(reader) = replica.state.encoder_key().filter(|reader| seen.insert(*reader)) else { continue };
        let hash = reader.files;
        match prompts.status(&reader) {
            EncoderStatus::Missing => {
                let Some(node) = view.nodes.iter().find(|node| node.name == replica.node) else { continue };
                prompts.offer_files(hash, replica.state.files_bytes, &|| {
                    node.directives.fetch_files(&hash);
                });
            }
            // At most one proof runs per model and front-end.
            EncoderStatus::Unproved if proofs.len() < MAX_CONCURRENT_PROOFS => {
                let Some(model) = base_model(replica).map(str::to_owned) else { continue };
                let (prompts, lanes, index) = (prompts.clone(), replica.lanes.clone(), replica.index);
                proofs.spawn(async move { prompts.prove(reader, &lanes, index, &model).await });
            }
            _ => {}
        }
    }
}

/// Has an engine probed that may have to say the tokens of prompts, once in its life.
fn probe_rendering(prompts: &Prompts, replica: &Arc<Replica>, proofs: &mut JoinSet<()>) {
    let is_needed = || replica.state.encoder_key().is_none_or(|reader| prompts.status(&reader).leaves_prompts());
    let is_known_cache = replica.cache.slot.is_some() && replica.state.exact_cache.is_some();
    let Some(model) = base_model(replica).map(str::to_owned).filter(|_| is_known_cache && proofs.len() < MAX_CONCURRENT_PROOFS) else {
        return;
    };
    if is_needed() && replica.local_load.rendering.begin_probe(replica.epoch, Instant::now()) {
        let (prompts, replica) = (prompts.clone(), replica.clone());
        proofs.spawn(async move { prompts.probe_rendering(&replica.rendering_engine(), &model).await });
    }
}

/// The model itself, not a LoRA adapter.
fn base_model(replica: &Replica) -> Option<&str> {
    replica.state.models.iter().find(|model| !model.is_adapter).map(|model| model.id.as_str())
}

#[cfg(test)]
mod tests;
