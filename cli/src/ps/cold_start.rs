//! What the starts of a fleet's engines were made of, in one line: queue, turn, stage, load and so
//! on.

use hostler_proto::agent::v1::Start;
use hostler_proto::fleet::v1::Replica;

/// Parts that took less, in seconds, are left out.
const SHORTEST_SHOWN: f32 = 0.5;

/// Parts that a start has only in a batch job, or with a model from elsewhere. Other starts are as
/// `hostler up` shows them.
const BEFORE_THE_ENGINE: [&str; 3] = ["queue", "turn", "stage"];

/// The line about replicas that serve; `None` if no start of theirs had to wait for a job or a
/// model, or nothing took long. Each part has its median.
pub(super) fn cold_start_line<'a>(replicas: impl Iterator<Item = &'a Replica>) -> Option<String> {
    let starts: Vec<Vec<(&str, f32)>> =
        replicas.filter(|replica| replica.is_ready()).filter_map(|replica| replica.state().start.as_ref().map(Start::parts)).collect();
    starts.iter().flatten().find(|(part, _)| BEFORE_THE_ENGINE.contains(part))?;
    let longest = starts.iter().max_by_key(|parts| parts.len())?;
    let median = |part: &str| {
        let of_start = |parts: &Vec<(&str, f32)>| parts.iter().find(|(name, _)| *name == part).map_or(0.0, |(_, seconds)| *seconds);
        let mut all: Vec<f32> = starts.iter().map(of_start).collect();
        all.sort_by(f32::total_cmp);
        all[all.len() / 2]
    };
    let parts = longest.iter().map(|(part, _)| (part, median(part))).filter(|(_, seconds)| *seconds >= SHORTEST_SHOWN);
    let words: Vec<String> = parts.map(|(part, seconds)| format!("{part} {seconds:.0} s")).collect();
    let of = if starts.len() > 1 { format!(" (medians of {} replicas)", starts.len()) } else { String::new() };
    (!words.is_empty()).then(|| format!("cold start: {}{of}", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Phase, ReplicaState, StartStage};

    use super::*;

    fn replica(phase: Phase, stages: &[(&str, f32)]) -> Replica {
        let stage = |(part, seconds): &(&str, f32)| StartStage { stage: "words".into(), seconds: *seconds, part: (*part).into() };
        let start = Start { origin: "plain".into(), stages: stages.iter().map(stage).collect() };
        Replica { state: Some(ReplicaState { phase: phase.into(), start: Some(start), ..ReplicaState::default() }), ..Replica::default() }
    }

    #[test]
    fn a_fleet_says_what_its_starts_were_made_of() {
        let first =
            replica(Phase::Ready, &[("queue", 90.0), ("stage", 40.4), ("begin", 0.1), ("load", 3.0), ("load", 4.0), ("warm-up", 9.0)]);
        let line = |replicas: &[Replica]| cold_start_line(replicas.iter());
        assert_eq!(line(std::slice::from_ref(&first)).unwrap(), "cold start: queue 90 s, stage 40 s, load 7 s, warm-up 9 s");
        let (second, third) = (replica(Phase::Ready, &[("load", 2.0)]), replica(Phase::Ready, &[("load", 1.0), ("stage", 1.0)]));
        assert_eq!(line(&[first, second, third]).unwrap(), "cold start: stage 1 s, load 2 s (medians of 3 replicas)");
        assert_eq!(line(&[replica(Phase::Loading, &[("stage", 2.0)]), replica(Phase::Ready, &[("", 9.0)])]), None);
        assert_eq!(line(&[replica(Phase::Ready, &[("begin", 9.0), ("load", 2.0)])]), None, "nothing came before the engine");
    }
}
