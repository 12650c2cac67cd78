//! Parses a controller's announcement into the fleet's own type. The announcement is an operator's
//! word, but clients read it and it is kept, so it is bounded.

use std::sync::Arc;
use std::time::Duration;

use hostler_proto::fleet::v1::{EntryUse as AnnouncedUse, ExpectRequest, ExpectedModel};
use tokio::time::Instant;

use crate::fleet::{EntryUse, Expectation, Expectations};

/// Most announced models, more than any fleet has. Each of them is in every list of models.
const MAX_MODELS: usize = 256;

const MAX_NAMES: usize = 8;

const MAX_NAME_BYTES: usize = 256;

/// Longest reason. A scheduler's comment on a job is a line.
const MAX_REASON_CHARS: usize = 500;

/// Most entries of a fleet, most uses of its nodes, and the longest name of either in bytes.
const MAX_ENTRIES: usize = 256;
const MAX_USES: usize = 16;
const MAX_ENTRY_NAME_BYTES: usize = 64;

/// Longest expected wait of a job, so that no announcement overflows a clock.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The reason that clients read if the controller gives none.
const NO_REASON: &str = "one is expected";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AnnouncementError {
    #[error("{0} models are announced: announce at most {MAX_MODELS}")]
    TooManyModels(usize),
    #[error("a model is announced by {0} names: give it 1 to {MAX_NAMES}")]
    NameCount(usize),
    #[error("the name {0:?} is no model's: use 1 to {MAX_NAME_BYTES} bytes without control characters")]
    InvalidName(String),
    #[error("the name {0:?} is announced twice: give it to one model")]
    SameName(String),
    #[error("{0} entries are announced: announce at most {MAX_ENTRIES}, each with at most {MAX_USES} uses of nodes")]
    TooManyEntries(usize),
    #[error("{0:?} is no entry's name or use: use 1 to {MAX_ENTRY_NAME_BYTES} letters, digits, '-', '_' and '.'")]
    InvalidEntry(String),
}

/// Reads an announcement that came `now`.
pub(super) fn parse_announcement(request: &ExpectRequest, now: Instant) -> Result<Expectations, AnnouncementError> {
    if request.models.len() > MAX_MODELS {
        return Err(AnnouncementError::TooManyModels(request.models.len()));
    }
    let mut expectations = Expectations::default();
    for model in &request.models {
        let names = &model.names;
        if !(1..=MAX_NAMES).contains(&names.len()) {
            return Err(AnnouncementError::NameCount(names.len()));
        }
        for name in names {
            if !expectations.insert(parse_model(model, name, now)?) {
                return Err(AnnouncementError::SameName(name.clone()));
            }
        }
    }
    // Names of models' own come first, whatever the order of the models.
    for model in request.models.iter().filter(|model| !model.alias.is_empty()) {
        expectations.insert_alias(parse_model(model, &model.alias, now)?, &model.names[0]);
    }
    if request.entries.len() > MAX_ENTRIES || request.entries.iter().any(|entry| entry.node_seconds.len() > MAX_USES) {
        return Err(AnnouncementError::TooManyEntries(request.entries.len()));
    }
    expectations.entries = request.entries.iter().map(|entry| parse_entry(entry, now)).collect::<Result<_, _>>()?;
    Ok(expectations)
}

/// An announced model under one of its names.
fn parse_model(model: &ExpectedModel, name: &str, now: Instant) -> Result<Expectation, AnnouncementError> {
    check_name(name)?;
    let expected_at = model.expected_in_ms.map(|left| now + Duration::from_millis(left).min(MAX_WAIT));
    let mut expectation = Expectation::new(name, expected_at, one_line(&model.reason));
    expectation.is_over = model.is_over;
    Ok(expectation)
}

fn parse_entry(entry: &AnnouncedUse, now: Instant) -> Result<EntryUse, AnnouncementError> {
    let is_of_names = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let is_name = |name: &str| (1..=MAX_ENTRY_NAME_BYTES).contains(&name.len()) && name.chars().all(is_of_names);
    if let Some(wrong) = [&entry.name].into_iter().chain(entry.node_seconds.keys()).find(|name| !is_name(name)) {
        return Err(AnnouncementError::InvalidEntry(wrong.chars().take(MAX_ENTRY_NAME_BYTES).collect()));
    }
    let seconds = entry.node_seconds.iter().map(|(used, seconds)| (used.clone(), if seconds.is_finite() { seconds.max(0.0) } else { 0.0 }));
    Ok(EntryUse {
        name: entry.name.clone(),
        node_seconds: seconds.collect(),
        budget: shorten(&entry.budget),
        budget_ends_at: entry.budget_ends_in_ms.map(|left| now + Duration::from_millis(left).min(MAX_WAIT)),
    })
}

fn check_name(name: &str) -> Result<(), AnnouncementError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        return Err(AnnouncementError::InvalidName(name.chars().take(MAX_NAME_BYTES).collect()));
    }
    Ok(())
}

fn one_line(reason: &str) -> Arc<str> {
    let words = if reason.trim().is_empty() { NO_REASON } else { reason.trim() };
    shorten(words).into()
}

fn shorten(words: &str) -> String {
    words.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(MAX_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(names: &[&str], reason: &str) -> ExpectedModel {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        ExpectedModel { names, expected_in_ms: Some(2000), reason: reason.to_owned(), ..ExpectedModel::default() }
    }

    fn parse(models: Vec<ExpectedModel>) -> Result<Expectations, AnnouncementError> {
        parse_announcement(&ExpectRequest { models, ..ExpectRequest::default() }, Instant::now())
    }

    #[test]
    fn every_name_of_an_announced_model_has_its_reason() {
        let now = Instant::now();
        let models = vec![model(&["a", "a-large"], " 2 jobs wait:\nngpus "), model(&["b"], &"é".repeat(600)), model(&["c"], "")];
        let known = parse_announcement(&ExpectRequest { models, ..ExpectRequest::default() }, now).unwrap();
        for (name, reason) in [("a", "2 jobs wait: ngpus"), ("a-large", "2 jobs wait: ngpus"), ("b", &*"é".repeat(500)), ("c", NO_REASON)]
        {
            let expectation = known.get(name).unwrap();
            assert_eq!((&*expectation.reason, expectation.expected_at), (reason, Some(now + Duration::from_secs(2))));
        }
    }

    #[test]
    fn a_model_is_announced_by_the_last_part_of_its_path_too() {
        let of_path = |path: &str, alias: &str| ExpectedModel { alias: alias.into(), ..model(&[path], "queued") };
        let known = parse(vec![of_path("/a/chat", "chat"), of_path("/a/tiny", "tiny"), model(&["chat"], "other")]).unwrap();
        let found = |name: &str| known.get(name).map(|found| (&*found.reason, found.model.alias_of.as_deref()));
        assert_eq!(found("tiny"), Some(("queued", Some("/a/tiny"))));
        assert_eq!(found("chat"), Some(("other", None)), "a name of its own comes first");
        assert_eq!(parse(vec![of_path("/a/tiny", "a\nb")]).unwrap_err(), AnnouncementError::InvalidName("a\nb".into()));
    }

    #[test]
    fn an_absurd_arrival_time_is_bounded() {
        let now = Instant::now();
        let forever = ExpectedModel { expected_in_ms: Some(u64::MAX), ..model(&["a"], "") };
        let known = parse_announcement(&ExpectRequest { models: vec![forever], ..ExpectRequest::default() }, now).unwrap();
        assert_eq!(known.get("a").unwrap().expected_at, Some(now + MAX_WAIT));
    }

    #[test]
    fn the_use_of_nodes_is_announced_within_bounds() {
        let announced = |name: &str, used: &str, seconds: f64| AnnouncedUse {
            name: name.into(),
            node_seconds: [(used.to_owned(), seconds)].into(),
            budget: "1.0 of 2 node-hours\nare used".into(),
            budget_ends_in_ms: Some(u64::MAX),
        };
        let parse = |entries: Vec<AnnouncedUse>| parse_announcement(&ExpectRequest { entries, ..ExpectRequest::default() }, Instant::now());
        let known = parse(vec![announced("chat", "serving", 1.5), announced("tiny", "idle", f64::NAN)]).unwrap().entries;
        assert_eq!((known[0].node_seconds["serving"], known[1].node_seconds["idle"]), (1.5, 0.0));
        assert_eq!(known[0].budget, "1.0 of 2 node-hours are used");
        let wrong = |name: &str, used: &str| parse(vec![announced(name, used, 1.0)]).unwrap_err();
        assert_eq!(wrong("a b", "idle"), AnnouncementError::InvalidEntry("a b".into()));
        assert_eq!(wrong("a", "\n"), AnnouncementError::InvalidEntry("\n".into()));
        let many = (0..=MAX_ENTRIES).map(|_| announced("a", "idle", 0.0)).collect();
        assert_eq!(parse(many).unwrap_err(), AnnouncementError::TooManyEntries(MAX_ENTRIES + 1));
    }

    #[test]
    fn an_announcement_beyond_the_bounds_is_refused_whole() {
        use AnnouncementError::{InvalidName, NameCount, SameName, TooManyModels};
        let numbered = |count: usize| (0..count).map(|number| model(&[&number.to_string()], "")).collect::<Vec<_>>();
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for (models, error) in [
            (numbered(MAX_MODELS + 1), TooManyModels(MAX_MODELS + 1)),
            (vec![model(&[], "")], NameCount(0)),
            (vec![model(&["a"; MAX_NAMES + 1], "")], NameCount(MAX_NAMES + 1)),
            (vec![model(&[""], "")], InvalidName(String::new())),
            (vec![model(&["a\nb"], "")], InvalidName("a\nb".into())),
            (vec![model(&[&long], "")], InvalidName("x".repeat(MAX_NAME_BYTES))),
            (vec![model(&["a"], ""), model(&["b", "a"], "")], SameName("a".into())),
        ] {
            assert_eq!(parse(models).unwrap_err(), error);
        }
        assert!(parse(numbered(MAX_MODELS)).is_ok());
    }
}
