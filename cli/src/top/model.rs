//! State of the view: the router's last answer, recent events, and the operator's position.
//!
//! Pure: answers and times come from `run`, keys from `keys`, and `draw` reads the state.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use hostler_proto::fleet::v1::{Decision, ListResponse, Node};

use super::events::RecentEvents;
use super::meter::CountMeter;
use super::order::{FleetOrder, Question, SortKey, SortedReplica, matches_filter};

/// A moment on two clocks: one for time spans, the other for people.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) at: Instant,
    pub(super) wall: SystemTime,
}

/// List in which keys move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Panel {
    #[default]
    Replicas,
    Nodes,
}

/// Present meaning of keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum KeyMode {
    #[default]
    Browse,
    /// The filter is being typed.
    Filter,
    Ask(Question),
    Help,
}

/// Silence of a router that does not answer.
#[derive(Debug)]
pub(super) struct RouterSilence {
    pub(super) since: Moment,
    pub(super) cause: String,
}

/// Details of a replica, as the router reports them.
#[derive(Debug)]
pub(super) struct ReplicaDetail {
    pub(super) replica: String,
    /// The last lines, or why there are none.
    pub(super) log: Result<Vec<String>, String>,
    /// Decisions, latest first.
    pub(super) decisions: Result<Vec<Decision>, String>,
}

#[derive(Debug)]
pub(super) struct TopModel {
    /// Address of the router.
    pub(super) router: String,
    /// Whether colours may be used.
    pub(super) has_color: bool,
    pub(super) now: Moment,
    /// The last answer, and when it came.
    pub(super) fleet: Option<(ListResponse, Moment)>,
    pub(super) silence: Option<RouterSilence>,
    pub(super) events: RecentEvents,
    pub(super) mode: KeyMode,
    pub(super) panel: Panel,
    pub(super) sort: SortKey,
    pub(super) is_reversed: bool,
    pub(super) filter: String,
    /// Replica that fills the screen, with the details known so far.
    pub(super) detail: Option<ReplicaDetail>,
    /// Result of the last order, or why a key does nothing.
    pub(super) notice: String,
    pub(super) selected_replica: Option<String>,
    pub(super) selected_node: Option<String>,
    meters: HashMap<String, CountMeter>,
    /// Of the router's answered requests, of those that found no room, and of those that ended in an
    /// error.
    ends: [CountMeter; 3],
}

impl TopModel {
    pub(super) fn new(router: String, has_color: bool, now: Moment) -> Self {
        Self {
            router,
            has_color,
            now,
            fleet: None,
            silence: None,
            events: RecentEvents::default(),
            mode: KeyMode::default(),
            panel: Panel::default(),
            sort: SortKey::default(),
            is_reversed: false,
            filter: String::new(),
            detail: None,
            notice: String::new(),
            selected_replica: None,
            selected_node: None,
            meters: HashMap::new(),
            ends: Default::default(),
        }
    }

    /// Applies an answer of the router.
    pub(super) fn apply(&mut self, fleet: ListResponse, now: Moment) {
        self.now = now;
        if let Some(silence) = self.silence.take() {
            let seconds = now.at.duration_since(silence.since.at).as_secs();
            self.events.push(now.wall, format!("the router answers again, after {seconds} s"));
        }
        self.meters.retain(|id, _| fleet.find_replica(id).is_some());
        for (_, replica) in fleet.replicas() {
            if let Some(engine) = replica.engine() {
                self.meters.entry(replica.id.clone()).or_default().record(now.at, replica.epoch, engine.generation_tokens);
            }
        }
        if let Some(requests) = fleet.requests {
            let counts = [requests.answered, requests.full, requests.error];
            self.ends.iter_mut().zip(counts).for_each(|(meter, count)| meter.record(now.at, 0, count));
        }
        self.fleet = Some((fleet, now));
        self.keep_selection();
    }

    /// Notes that the router has not answered. The shown figures stay, marked as old.
    pub(super) fn note_silence(&mut self, cause: String, now: Moment) {
        self.now = now;
        match &mut self.silence {
            Some(silence) => silence.cause = cause,
            None => {
                self.events.push(now.wall, format!("the router does not answer: {cause}"));
                self.silence = Some(RouterSilence { since: now, cause });
            }
        }
    }

    /// Applies the details of one replica, unless the operator has left it meanwhile.
    pub(super) fn apply_detail(&mut self, detail: ReplicaDetail) {
        if self.detail.as_ref().is_some_and(|shown| shown.replica == detail.replica) {
            self.detail = Some(detail);
        }
    }

    /// Applies the result of an order.
    pub(super) fn apply_order(&mut self, order: &FleetOrder, done: Result<Vec<String>, String>, now: Moment) {
        self.now = now;
        let FleetOrder { kind, target } = order;
        self.notice = match done {
            Ok(replicas) => format!("ordered: {} {}", kind.as_str(), replicas.join(", ")),
            Err(error) => format!("could not {} {target}: {error}", kind.as_str()),
        };
    }

    /// How old the shown figures are, if they are out of date.
    pub(super) fn age(&self) -> Option<Duration> {
        let (_, seen) = self.fleet.as_ref().filter(|_| self.silence.is_some())?;
        Some(self.now.at.saturating_duration_since(seen.at))
    }

    pub(super) fn picture(&self) -> Option<&ListResponse> {
        self.fleet.as_ref().map(|(fleet, _)| fleet)
    }

    /// Replicas that pass the filter, in the chosen order.
    pub(super) fn shown_replicas(&self) -> Vec<SortedReplica<'_>> {
        let Some(fleet) = self.picture() else { return Vec::new() };
        let shown = fleet.replicas().filter(|(node, replica)| matches_filter(node, replica, &self.filter));
        let shown = shown.map(|(_, replica)| SortedReplica {
            replica,
            tokens_per_second: self.tokens_per_second(&replica.id),
            first_token: replica.first_tokens.map(|times| times.p99),
        });
        let mut shown: Vec<SortedReplica<'_>> = shown.collect();
        shown.sort_by(|one, other| self.sort.compare(one, other));
        if self.is_reversed {
            shown.reverse();
        }
        shown
    }

    pub(super) fn shown_nodes(&self) -> &[Node] {
        self.picture().map_or(&[], |fleet| &fleet.nodes)
    }

    /// Rate of a replica; `None` until its counter has been seen twice.
    pub(super) fn tokens_per_second(&self, replica: &str) -> Option<f64> {
        self.meters.get(replica)?.rate()
    }

    /// Requests a second that were answered, found no room, and ended in an error.
    pub(super) fn ends_per_second(&self) -> [Option<f64>; 3] {
        self.ends.each_ref().map(CountMeter::rate)
    }

    /// Row of the selection in its list.
    pub(super) fn selected_row(&self, panel: Panel) -> Option<usize> {
        match panel {
            Panel::Replicas => self.shown_replicas().iter().position(|of| Some(&of.replica.id) == self.selected_replica.as_ref()),
            Panel::Nodes => self.shown_nodes().iter().position(|node| Some(&node.name) == self.selected_node.as_ref()),
        }
    }

    /// Selects a row of the panel in which keys move; the last one if there are fewer.
    pub(super) fn select(&mut self, row: usize) {
        let at = |count: usize| (count > 0).then(|| row.min(count - 1));
        match self.panel {
            Panel::Replicas => {
                let shown = self.shown_replicas();
                self.selected_replica = at(shown.len()).map(|row| shown[row].replica.id.clone());
            }
            Panel::Nodes => {
                let shown = self.shown_nodes();
                self.selected_node = at(shown.len()).map(|row| shown[row].name.clone());
            }
        }
    }

    /// Target of orders: the replica that fills the screen, or the selection.
    pub(super) fn target(&self) -> Option<String> {
        match (&self.detail, self.panel) {
            (Some(detail), _) => Some(detail.replica.clone()),
            (None, Panel::Replicas) => self.selected_replica.clone(),
            (None, Panel::Nodes) => self.selected_node.clone(),
        }
    }

    /// Keeps the selection on its replica and its node after rows have changed. If they are gone or
    /// hidden, it moves to the first row.
    pub(super) fn keep_selection(&mut self) {
        let panel = self.panel;
        for one in [Panel::Replicas, Panel::Nodes] {
            self.panel = one;
            if self.selected_row(one).is_none() {
                self.select(0);
            }
        }
        self.panel = panel;
    }
}
