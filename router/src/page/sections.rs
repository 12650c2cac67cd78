//! A picture in sections, each written as JSON once: a node, a request, the steps of
//! the last hour. Sections that are unchanged since a second ago are not sent again.

use std::collections::HashMap;
use std::time::SystemTime;

use bytes::Bytes;
use hostler_proto::fleet::v1::{FleetEvent, ModelDemand, TenantUse};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::picture::{NodePicture, RequestPicture, Totals, trim};
use crate::access_log::RefusalLog;
use crate::event_log::millis_since_1970;
use crate::fleet::Fleet;
use crate::history::{FleetStep, History, MAX_STEPS, OPEN_STEPS};
use crate::operators::Operators;

/// Most requests in the list.
const MAX_REQUESTS: usize = 50;

/// Most events that a viewer gets at first.
const MAX_EVENTS: usize = 200;

/// What was last sent.
#[derive(Debug, Default)]
pub(super) struct Sections {
    /// The sections by key.
    sent: HashMap<String, Box<RawValue>>,
    /// The number of the last event.
    last_event: u64,
    /// The latest events, for a viewer who comes.
    events: Option<Box<RawValue>>,
    /// When the last step of the history ended.
    last_step: u64,
    /// All of its steps, for a viewer who comes.
    steps: Option<Box<RawValue>>,
    /// The refused requests, and the version of their list.
    refused: Option<(u64, Box<RawValue>)>,
}

/// An event: everything, or the changes.
#[derive(Serialize)]
struct EventData<'a> {
    number: u64,
    /// Milliseconds since 1970.
    at: u64,
    whole: bool,
    version: &'static str,
    totals: &'a Totals,
    tenants: &'a [TenantUse],
    models: &'a [ModelDemand],
    /// All present names, in order, so that vanished nodes can be left out.
    node_names: Vec<&'a str>,
    nodes: Vec<&'a RawValue>,
    request_keys: Vec<&'a str>,
    requests: Vec<&'a RawValue>,
    /// All requests that no replica got, the latest first, if one has come.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'a RawValue>,
    /// The steps of the last hour at first, then those that are new or have changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    history: Option<&'a RawValue>,
    /// The last hour's at first, then new ones, the oldest first.
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<&'a RawValue>,
}

struct Section {
    /// The kind of the section, a space, and its name within that kind.
    key: String,
    json: Box<RawValue>,
    is_new: bool,
}

impl Sections {
    /// The present picture as two events: all of it, and the changes since the last one.
    pub(super) fn gather(&mut self, calls: &Operators, number: u64, now: SystemTime) -> (Bytes, Bytes) {
        let mut listed = calls.list_fleet();
        listed.mark_suspects();
        trim(&mut listed);
        let totals = Totals::from(&listed);
        let nodes: Vec<Section> = listed.nodes.iter().map(|node| self.section("node", &node.name, &NodePicture::new(node, now))).collect();
        let decisions = calls.placer.decisions.latest(MAX_REQUESTS);
        let requests = decisions.iter().map(|decision| RequestPicture::new(decision));
        let requests: Vec<Section> =
            requests.map(|request| self.section("request", &format!("{}-{}", request.id, request.attempt), &request)).collect();
        let (new_events, new_steps) = (self.take_events(&calls.fleet), self.take_steps(&calls.history));
        let has_refused = self.take_refused(&calls.refusals);
        let event = |whole: bool| {
            encode(&EventData {
                number,
                at: millis_since_1970(now),
                whole,
                version: env!("CARGO_PKG_VERSION"),
                totals: &totals,
                tenants: &listed.tenants,
                models: &listed.demand,
                node_names: names(&nodes),
                nodes: nodes.iter().filter_map(|node| node.shown(whole)).collect(),
                request_keys: names(&requests),
                requests: requests.iter().filter_map(|request| request.shown(whole)).collect(),
                refused: self.refused.as_ref().filter(|_| whole || has_refused).map(|(_, list)| &**list),
                history: if whole { self.steps.as_deref() } else { new_steps.as_deref() },
                events: if whole { self.events.as_deref() } else { new_events.as_deref() },
            })
        };
        let events = (event(true), event(false));
        self.sent = nodes.into_iter().chain(requests).map(|section| (section.key, section.json)).collect();
        events
    }

    /// Steps that are new or have changed since the last picture, as JSON.
    fn take_steps(&mut self, history: &History) -> Option<Box<RawValue>> {
        let last = history.last_at();
        if self.last_step == last && self.steps.is_some() {
            return None;
        }
        self.last_step = last;
        let write = |steps: &[FleetStep]| to_raw_value(steps).expect("all keys in a step are strings");
        let steps = history.latest(MAX_STEPS);
        let changed = write(&steps[steps.len().saturating_sub(OPEN_STEPS)..]);
        self.steps = Some(write(&steps));
        Some(changed)
    }

    /// Whether requests were refused since the last picture.
    fn take_refused(&mut self, refusals: &RefusalLog) -> bool {
        let Some((version, list)) = refusals.since(self.refused.as_ref().map_or(0, |(known, _)| *known)) else { return false };
        self.refused = Some((version, to_raw_value(&list).expect("all keys in a refusal are strings")));
        true
    }

    /// Events since the last picture, as JSON.
    fn take_events(&mut self, fleet: &Fleet) -> Option<Box<RawValue>> {
        let (log, known) = (fleet.events(), self.last_event);
        self.last_event = log.last_number();
        if self.last_event == known && self.events.is_some() {
            return None;
        }
        let write = |events: &[FleetEvent]| to_raw_value(events).expect("all keys in an event are strings");
        self.events = Some(write(&log.after(0, MAX_EVENTS)));
        Some(write(&log.after(known, MAX_EVENTS)))
    }

    fn section(&self, kind: &str, name: &str, content: &impl Serialize) -> Section {
        let json = to_raw_value(content).expect("all keys in a picture are strings");
        let key = format!("{kind} {name}");
        let is_new = self.sent.get(&key).is_none_or(|known| known.get() != json.get());
        Section { key, json, is_new }
    }
}

impl Section {
    fn shown(&self, whole: bool) -> Option<&RawValue> {
        (whole || self.is_new).then_some(&*self.json)
    }
}

fn names(sections: &[Section]) -> Vec<&str> {
    sections.iter().filter_map(|section| Some(section.key.split_once(' ')?.1)).collect()
}

/// Encodes a server-sent event. JSON has no line breaks of its own.
fn encode(data: &EventData<'_>) -> Bytes {
    let mut event = b"data: ".to_vec();
    serde_json::to_writer(&mut event, data).expect("all keys in an event are strings");
    event.extend_from_slice(b"\n\n");
    event.into()
}
