//! The models of the fleet, as typed messages.

use std::sync::Arc;

use hostler_proto::inference::v1 as wire;
use serde::Deserialize;

use crate::fleet::{FleetView, Replica};
use crate::keys::Caller;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ModelCard {
    parent: Option<String>,
    max_model_len: Option<u64>,
}

pub(super) fn list(view: &FleetView, caller: &Caller) -> Vec<wire::Model> {
    let allowed = view.models().into_iter().filter(|model| caller.may_use(&model.id));
    let model = allowed.map(|model| {
        let card: ModelCard = serde_json::from_slice(&model.card).unwrap_or_default();
        let serving = || view.replicas.iter().filter(|replica| replica.serves(Some(&model.id)));
        wire::Model {
            id: model.id.clone(),
            parent: card.parent.unwrap_or_default(),
            max_tokens: card.max_model_len,
            ready_replicas: count(serving().filter(|replica| replica.is_ready())),
            replicas: count(serving()),
            card_json: String::from_utf8_lossy(&model.card).into_owned(),
        }
    });
    model.collect()
}

fn count<'a>(replicas: impl Iterator<Item = &'a Arc<Replica>>) -> u32 {
    u32::try_from(replicas.count()).unwrap_or(u32::MAX)
}
