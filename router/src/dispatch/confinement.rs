//! Confines tenants whose requests crash engines (`crash_suspects` counts them) to one replica of
//! the model.

use std::sync::Arc;

use super::{Dispatch, OutboundRequest, Refusal};
use crate::crash_suspects::{Confinement, ConfinementChoices, CrashWatch};
use crate::fleet::{FleetView, Phase, Replica};

/// A request of a confined tenant.
#[derive(Debug)]
pub(super) struct ConfinedRequest {
    confinement: Confinement,
    /// Replicas that the request may not go to, including those already tried.
    pub(super) closed: Vec<Arc<str>>,
}

impl ConfinedRequest {
    /// Why the request cannot be sent now.
    pub(super) fn refusal(&self) -> Refusal {
        Refusal::of_confined(&self.confinement)
    }
}

impl Dispatch {
    /// The replicas closed to the request, including those it `tried`, if its tenant is confined.
    pub(super) fn confine(
        &self,
        model: Option<&str>,
        outgoing: &OutboundRequest,
        tried: &[Arc<str>],
        crash_watch: &CrashWatch,
    ) -> Option<ConfinedRequest> {
        if !crash_watch.is_confined() {
            return None;
        }
        let view = self.fleet.view();
        let confinement = crash_watch.confine(model, &choices(&view, model))?;
        if let Some(replica) = confinement.replica.as_ref().filter(|_| confinement.is_new) {
            tracing::warn!(
                event = "tenant_confined",
                tenant = %outgoing.owner,
                model,
                %replica,
                crashes = confinement.crashes,
                "requests of a tenant have crashed engines: all its requests for this model go to one replica"
            );
            let words = format!("requests of {} have crashed {} engines: all of them go to {replica}", outgoing.owner, confinement.crashes);
            self.fleet.events().record("tenant_confined", replica, &words, true);
        }
        let others = view.replicas.iter().map(|replica| &replica.id).filter(|id| confinement.replica.as_ref() != Some(id));
        let closed = tried.iter().chain(others).cloned().collect();
        Some(ConfinedRequest { confinement, closed })
    }
}

fn choices(view: &FleetView, model: Option<&str>) -> ConfinementChoices {
    let is_expected =
        |replica: &&Arc<Replica>| matches!(replica.state.phase, Phase::Starting | Phase::Loading | Phase::Ready | Phase::Failed);
    ConfinementChoices {
        ready: view.eligible(model, &[]).map(|(_, replica)| replica.id.clone()).collect(),
        expected: view.replicas.iter().filter(is_expected).map(|replica| replica.id.clone()).collect(),
    }
}
