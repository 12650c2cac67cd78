//! Clients' demand for each model, for a controller that decides how many replicas there should be.

use hostler_proto::fleet::v1::ModelDemand;
use tokio::time::Instant;

use super::{count, millis};
use crate::fleet::{Expectation, FleetView};
use crate::placement::RequestQueue;

/// The demand for each model that is attached or expected. Models that only clients name have no
/// entry.
pub(super) fn list_demand(view: &FleetView, queue: &RequestQueue, now: Instant) -> Vec<ModelDemand> {
    let demand = view.models().into_iter().map(|model| {
        let serving = || view.replicas.iter().filter(|replica| replica.serves(Some(&model.id)));
        let last_miss = view.expectation(Some(&model.id)).and_then(Expectation::last_miss);
        let last_request = serving().filter_map(|replica| replica.last_request).chain(last_miss).max();
        ModelDemand {
            model: model.id.clone(),
            waiting: count(queue.waiting_count_of(&model.id)),
            in_flight: serving().map(|replica| replica.local_load.in_flight() + replica.load.in_flight_elsewhere).sum(),
            last_request_ms_ago: last_request.map(|at| millis(now.saturating_duration_since(at))),
            alias_of: model.alias_of.clone().unwrap_or_default(),
        }
    });
    demand.collect()
}
