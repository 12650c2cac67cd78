use std::path::PathBuf;

use hostler_placement::affinity::{CacheIndex, ChainGaps};
use hostler_prompt::{Dialect, PromptForm, PromptForms};
use hostler_proto::agent::v1 as wire;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::directive::Order;

use super::*;
use crate::fleet::tests::{ReplicaChange, attach_told, fleet, ready, state};
use crate::fleet::{CacheTier, Directives, FleetUpdate, Phase, ReplicaCache, ReplicaStatus};
use crate::prompt::EncoderKey;
use crate::prompt::tests::prove;

const FILES: [u8; 32] = [7; 32];

/// A replica that has these files.
fn with_files(index: u32, phase: Phase) -> ReplicaChange {
    ReplicaChange { state: Some(ReplicaStatus { files: Some(FILES), files_bytes: 1000, ..state(phase, "m") }), ..ready(index) }
}

#[tokio::test(start_paused = true)]
async fn missing_prompt_files_are_requested_once() {
    let (fleet, prompts) = (fleet(), Prompts::new(PathBuf::new(), 1));
    let (directives, mut messages) = Directives::connect();
    let replicas = vec![ready(0), with_files(1, Phase::Loading), with_files(2, Phase::Ready), with_files(3, Phase::Ready)];
    let _lane = attach_told(&fleet, 1, directives, replicas).await;
    scan_fleet(&prompts, &fleet, &mut JoinSet::new());
    scan_fleet(&prompts, &fleet, &mut JoinSet::new());
    let Some(ToAgent::Directive(fetch)) = messages.try_recv().unwrap().unwrap().message else { panic!("no directive") };
    assert_eq!(fetch.order, Some(Order::FetchFiles(wire::FetchFiles { hash: FILES.to_vec().into() })));
    assert!(messages.try_recv().is_err(), "two replicas have the same files");
    let reader = EncoderKey { files: FILES, dialect: Dialect::Python };
    assert_eq!(prompts.status(&reader), EncoderStatus::Loading);
    // The agent does not send the files.
    sleep(Duration::from_secs(60)).await;
    scan_fleet(&prompts, &fleet, &mut JoinSet::new());
    assert!(messages.try_recv().is_ok());
}

#[tokio::test(start_paused = true)]
async fn only_engines_whose_prompts_no_encoder_reads_are_probed() {
    let (fleet, prompts) = (fleet(), Prompts::new(PathBuf::new(), 1));
    let known = ReplicaStatus { exact_cache: Some(ChainGaps::None), ..state(Phase::Ready, "m") };
    let own = |files: u8| ReplicaStatus { files: Some([files; 32]), files_bytes: 1000, ..known.clone() };
    let states = [known.clone(), own(1), own(2), own(3), state(Phase::Ready, "m")];
    let replicas = (0..).zip(states).map(|(index, state)| ReplicaChange { state: Some(state), ..ready(index) }).collect();
    let _lane = attach_told(&fleet, 1, Directives::connect().0, replicas).await;
    let index = CacheIndex::new();
    for replica in 0..5 {
        let cache = ReplicaCache { slot: Some(index.open()), ..ReplicaCache::default() };
        fleet.update(FleetUpdate::CacheChanged { attachment: 1, tier: CacheTier::Gpu, index: replica, epoch: 1, cache }).await;
    }
    crate::fleet::tests::report(&fleet, 1, false, Vec::new()).await;
    let reader = |files: u8| EncoderKey { files: [files; 32], dialect: Dialect::Python };
    prove(&prompts, &reader(1), PromptForms::ALL);
    prove(&prompts, &reader(2), PromptForms::default().with(PromptForm::Texts));
    let mut probes = JoinSet::new();
    scan_fleet(&prompts, &fleet, &mut probes);
    let is_due = |replica: &Arc<Replica>| replica.local_load.rendering.begin_probe(replica.epoch, Instant::now());
    let left: Vec<bool> = fleet.view().replicas.iter().map(is_due).collect();
    // Without files, proved, partly proved, unread as yet, and with an unknown cache.
    assert_eq!((probes.len(), left), (2, vec![false, true, false, true, true]));
}

#[tokio::test(start_paused = true)]
async fn only_the_base_model_is_used_for_proofs() {
    let fleet = fleet();
    let adapter = crate::fleet::Model::new("lora".into(), r#"{"parent":"m"}"#.into());
    let base = state(Phase::Ready, "m");
    let models = [vec![adapter.clone()], base.models.clone()].concat();
    let replicas = vec![
        ReplicaChange { state: Some(ReplicaStatus { models, ..base.clone() }), ..ready(0) },
        ReplicaChange { state: Some(ReplicaStatus { models: vec![adapter], ..base }), ..ready(1) },
    ];
    let _lane = attach_told(&fleet, 1, Directives::connect().0, replicas).await;
    let view = fleet.view();
    assert_eq!((base_model(&view.replicas[0]), base_model(&view.replicas[1])), (Some("m"), None));
}
