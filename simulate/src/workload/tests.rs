use std::collections::{HashMap, HashSet};
use std::io::Write;

use super::*;
use crate::request::BLOCK_TOKENS;

fn shape(requests: usize) -> WorkloadShape {
    WorkloadShape { requests, ..WorkloadShape::default() }
}

fn all(kind: WorkloadKind, shape: &WorkloadShape) -> Vec<Arrival> {
    shape.workload(kind).unwrap().arrivals
}

fn trace(text: &str) -> (std::path::PathBuf, Result<Workload, TraceError>) {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("hostler-trace-{}-{number}.jsonl", std::process::id()));
    std::fs::File::create(&file).unwrap().write_all(text.as_bytes()).unwrap();
    let workload =
        WorkloadShape { trace: Some(file.clone()), rate: Some(2.0), ..WorkloadShape::default() }.workload(WorkloadKind::Mooncake);
    std::fs::remove_file(&file).unwrap();
    (file, workload)
}

const SYNTHETIC: [WorkloadKind; 4] = [WorkloadKind::Agentic, WorkloadKind::HotPrefix, WorkloadKind::Bursts, WorkloadKind::NoSharing];

#[test]
fn a_seed_reproduces_every_workload() {
    for kind in SYNTHETIC {
        let print = |seed| format!("{:?}", all(kind, &WorkloadShape { seed, ..shape(50) }));
        assert_eq!(print(3), print(3));
        assert_ne!(print(3), print(4));
    }
}

#[test]
fn a_workload_has_the_requested_size_and_whole_block_keys() {
    for kind in SYNTHETIC {
        let arrivals = all(kind, &shape(333));
        assert_eq!(arrivals.len(), 333);
        for Arrival { request, .. } in &arrivals {
            assert!(request.prompt > 0 && request.output > 0);
            assert!(request.keys.len() >= ((request.prompt + request.output) / BLOCK_TOKENS) as usize, "{kind:?}");
        }
    }
}

#[test]
fn a_later_turn_contains_the_earlier_prompt_and_answer() {
    let arrivals = all(WorkloadKind::Agentic, &shape(500));
    let mut later = 0;
    for (index, arrival) in arrivals.iter().enumerate() {
        if let ArrivalTime::After(before, _) = arrival.start {
            let before_it = &arrivals[before].request;
            assert!(before < index && before_it.session == arrival.request.session);
            assert!(arrival.request.prompt > before_it.prompt + before_it.output);
            later += 1;
        }
    }
    assert!(later > 300, "{later} later turns");
}

#[test]
fn each_workload_shares_prefixes_as_its_name_says() {
    let repeats = |kind| {
        let mut counts: HashMap<u64, usize> = HashMap::new();
        all(kind, &shape(320)).iter().for_each(|arrival| *counts.entry(arrival.request.keys[0]).or_default() += 1);
        counts.into_values().max().unwrap()
    };
    assert_eq!((repeats(WorkloadKind::NoSharing), repeats(WorkloadKind::Bursts)), (1, 16));
    assert!((180..270).contains(&repeats(WorkloadKind::HotPrefix)));
}

#[test]
fn a_trace_is_scaled_in_time_and_shares_blocks() {
    let (_, workload) = trace(
        "{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 5, \"hash_ids\": [7, 8]}\n\n\
         {\"timestamp\": 3000, \"input_length\": 1024, \"output_length\": 5, \"hash_ids\": [7, 9], \"more\": 1}\n",
    );
    let arrivals = workload.unwrap().arrivals;
    assert_eq!(arrivals.len(), 2);
    assert_eq!(arrivals[1].start, ArrivalTime::At(1.5));
    let shared: HashSet<u64> = arrivals[0].request.keys.iter().copied().collect();
    assert_eq!(arrivals[1].request.keys.iter().filter(|key| shared.contains(key)).count(), 512 / 16);
}

#[test]
fn an_invalid_trace_line_is_named() {
    let good = "{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 5, \"hash_ids\": [7]}\n";
    for (bad, what) in [
        ("{\"timestamp\": 0}", "missing field"),
        ("nonsense", "expected"),
        ("{\"timestamp\": 0, \"input_length\": 1000, \"output_length\": 5, \"hash_ids\": [7]}", "1 ids of 512 tokens do not fit"),
        ("{\"timestamp\": -1, \"input_length\": 10, \"output_length\": 5, \"hash_ids\": [7]}", "timestamp"),
        ("{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 5, \"hash_ids\": []}", "at least one token"),
        ("{\"timestamp\": 0, \"input_length\": -3, \"output_length\": 5, \"hash_ids\": [7]}", "invalid value"),
    ] {
        let (file, workload) = trace(&format!("{good}{bad}\n"));
        let error = workload.unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}, line 2: ", file.display())) && error.contains(what), "{error}");
    }
}

#[test]
fn a_missing_or_empty_trace_is_refused_with_advice() {
    let missing = shape(1).workload(WorkloadKind::Mooncake).unwrap_err().to_string();
    assert!(missing.contains("--trace FILE"), "{missing}");
    let unreadable =
        WorkloadShape { trace: Some("/nowhere/at-all".into()), ..shape(1) }.workload(WorkloadKind::Mooncake).unwrap_err().to_string();
    assert!(unreadable.starts_with("cannot read /nowhere/at-all: "), "{unreadable}");
    assert!(trace("\n").1.unwrap_err().to_string().contains(" holds no request; give"));
}
