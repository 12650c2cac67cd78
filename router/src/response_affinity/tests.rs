use http::Method;

use super::*;
use crate::fleet::tests::{attach, fleet, ready};

fn life(replica: &str, epoch: u64) -> EngineLife {
    EngineLife { replica: replica.into(), epoch }
}

fn named(method: &str, path: &str, previous: Option<&str>) -> ResponseReference {
    ResponseReference::parse(&Method::from_bytes(method.as_bytes()).unwrap(), path, previous)
}

#[test]
fn a_request_names_a_response_by_path_or_body() {
    let about = |id: &str| ResponseReference::Addresses(id.into());
    for (method, path, previous, expected) in [
        ("POST", "/v1/responses", None, ResponseReference::Creates),
        ("POST", "/v1/responses", Some("resp_1"), ResponseReference::Continues("resp_1".into())),
        ("GET", "/v1/responses", None, ResponseReference::None),
        ("GET", "/v1/responses/resp_1", None, about("resp_1")),
        ("POST", "/v1/responses/resp_1/cancel", None, about("resp_1")),
        ("DELETE", "/v1/responses/resp_1", None, about("resp_1")),
        ("GET", "/v1/responses/resp%5f1/input_items", None, about("resp_1")),
        ("GET", "/v1/%72esponses/resp_1", None, about("resp_1")),
        ("POST", "/v1/responses/render", Some("resp_1"), ResponseReference::Continues("resp_1".into())),
        ("POST", "/v1/responses/render", None, ResponseReference::None),
        ("GET", "/v1/responses/", None, ResponseReference::None),
        ("POST", "/v1/responses2", Some("resp_1"), ResponseReference::None),
        ("POST", "/v1/chat/completions", Some("resp_1"), ResponseReference::None),
    ] {
        assert_eq!(named(method, path, previous), expected, "{method} {path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_belongs_to_its_tenant_until_forgotten() {
    let (affinity, owner, thief): (_, Arc<str>, Arc<str>) = (ResponseAffinity::default(), "owner".into(), "thief".into());
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0), ready(1)]).await;
    let view = fleet.view();
    let find = |id: &str, tenant: &str| affinity.look_up(id, tenant, &view, Instant::now());
    affinity.record("resp_1", life("n/0", 1), &owner, Instant::now());
    assert_eq!(find("resp_1", "owner"), ResponseLookup::Found(life("n/0", 1)));
    assert_eq!((find("resp_1", "thief"), find("resp_2", "owner")), (ResponseLookup::Unavailable, ResponseLookup::Unknown));
    assert!(
        affinity.belongs_to_another("resp_1", "thief", Instant::now()) && !affinity.belongs_to_another("resp_1", "owner", Instant::now())
    );
    affinity.record("resp_1", life("n/1", 1), &thief, Instant::now());
    assert_eq!(find("resp_1", "owner"), ResponseLookup::Found(life("n/0", 1)), "a name that is taken is not given away");
    affinity.record("resp_1", life("n/1", 1), &owner, Instant::now());
    assert_eq!(find("resp_1", "owner"), ResponseLookup::Found(life("n/1", 1)));
    affinity.record("resp_3", life("n/0", 0), &owner, Instant::now());
    assert_eq!(find("resp_3", "owner"), ResponseLookup::Unavailable, "its engine has begun another life");
    tokio::time::advance(RETENTION).await;
    assert_eq!(find("resp_1", "owner"), ResponseLookup::Unknown);
    affinity.record(&"x".repeat(MAX_ID_BYTES + 1), life("n/0", 1), &owner, Instant::now());
    affinity.record("resp_4", life("n/0", 1), &owner, Instant::now());
    assert_eq!(affinity.0.lock().by_id.len(), 1, "what is over has made way");
}

#[tokio::test(start_paused = true)]
async fn the_oldest_response_makes_way() {
    let (affinity, tenant): (_, Arc<str>) = (ResponseAffinity::default(), "".into());
    let now = Instant::now();
    for number in 0..MAX_RESPONSES + 10 {
        affinity.record(&format!("resp_{number}"), life("n/0", 1), &tenant, now);
        // A response recorded repeatedly holds one place.
        affinity.record("resp_same", life("n/0", 1), &tenant, now + Duration::from_nanos(number as u64));
    }
    assert!(
        affinity.0.lock().by_id.len() <= MAX_RESPONSES
            && affinity.0.lock().expirations.values().map(VecDeque::len).sum::<usize>() <= MAX_RESPONSES,
        "{}",
        affinity.0.lock().by_id.len()
    );
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let view = fleet.view();
    assert_eq!(affinity.look_up("resp_0", "", &view, now), ResponseLookup::Unknown);
    assert_eq!(affinity.look_up("resp_same", "", &view, now), ResponseLookup::Found(life("n/0", 1)));
}

#[tokio::test(start_paused = true)]
async fn a_tenant_with_many_responses_displaces_only_its_own() {
    let (affinity, greedy, modest): (_, Arc<str>, Arc<str>) = (ResponseAffinity::default(), "greedy".into(), "modest".into());
    let fleet = fleet();
    attach(&fleet, 1, vec![ready(0)]).await;
    let (view, now) = (fleet.view(), Instant::now());
    affinity.record("resp_modest", life("n/0", 1), &modest, now);
    for number in 0..2 * MAX_RESPONSES {
        affinity.record(&format!("resp_{number}"), life("n/0", 1), &greedy, now);
    }
    assert_eq!(affinity.look_up("resp_modest", "modest", &view, now), ResponseLookup::Found(life("n/0", 1)));
    assert_eq!(affinity.look_up("resp_0", "greedy", &view, now), ResponseLookup::Unknown);
    assert_eq!(affinity.look_up(&format!("resp_{}", 2 * MAX_RESPONSES - 1), "greedy", &view, now), ResponseLookup::Found(life("n/0", 1)));
    // A tenant that comes later gets its share too.
    for number in 0..100 {
        affinity.record(&format!("resp_late_{number}"), life("n/0", 1), &modest, now);
    }
    assert_eq!(affinity.look_up("resp_modest", "modest", &view, now), ResponseLookup::Found(life("n/0", 1)));
    assert_eq!(affinity.0.lock().by_id.len(), MAX_RESPONSES);
}

#[test]
fn the_response_id_is_read_however_bytes_are_cut() {
    let whole = br#"{"id":"resp_a\"b","created_at":1,"output":[{"id":"msg_1"}]}"#;
    let streamed = b": keep-alive\n\nevent: response.created\ndata: {\"response\":{\"id\": \"resp_a\\\"b\",\"object\":\"response\"}}\n\n";
    for answer in [&whole[..], &streamed[..]] {
        for cut in 0..answer.len() {
            let affinity = ResponseAffinity::default();
            let mut watch = ResponseIdReader::new(ResponseRecorder { affinity: affinity.clone(), tenant: "".into() }, life("n/0", 1));
            let done = watch.push(&answer[..cut]) || watch.push(&answer[cut..]);
            assert!(done && affinity.0.lock().by_id.contains_key("resp_a\"b"), "{cut}");
        }
    }
}

#[test]
fn an_answer_without_an_id_is_soon_ignored() {
    let affinity = ResponseAffinity::default();
    let mut watch = ResponseIdReader::new(ResponseRecorder { affinity: affinity.clone(), tenant: "".into() }, life("n/0", 1));
    assert!(!watch.push(&[b' '; 1000]));
    assert!(watch.push(&[b' '; 100_000]) && affinity.0.lock().by_id.is_empty());
}
