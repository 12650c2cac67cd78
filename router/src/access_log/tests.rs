use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;

use super::line::AccessLine;
use super::*;

fn line() -> AccessLine {
    AccessLine { ended_at: UNIX_EPOCH + Duration::from_millis(1_700_000_000_123), ..AccessLine::new(Instant::now()) }
}

fn full() -> AccessLine {
    AccessLine {
        method: Method::POST,
        path: Some("/v1/chat/completions".into()),
        client_id: Some("job 7".into()),
        trace: Some(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736),
        key: "k7".into(),
        tenant: "physics".into(),
        id: 0xabc,
        model: Some("llama".into()),
        replica: Some("n0/1".into()),
        attempts: 2,
        queued: Duration::from_micros(250_049),
        first_byte: Some(Duration::from_millis(312)),
        total: Duration::from_secs(65),
        usage: Some(TokenUsage { prompt_tokens: 1200, completion_tokens: 64, cached_tokens: Some(1024) }),
        outcome: Some(AnswerOutcome::Complete),
        status: Some(200),
        bytes: 9876,
        ..line()
    }
}

fn written(line: &AccessLine, format: AccessFormat) -> String {
    let mut text = String::new();
    line.write(format, &mut text);
    text
}

#[test]
fn an_access_line_has_everything_but_the_query() {
    let text = written(&full(), AccessFormat::Text);
    assert_eq!(
        text,
        "2023-11-14T22:13:20.123Z id=0000000000000abc status=200 outcome=complete method=POST path=/v1/chat/completions model=llama key=k7 \
         tenant=physics replica=n0/1 attempts=2 tokens_in=1200 tokens_out=64 tokens_cached=1024 queued=0.2500 first=0.3120 total=65.0000 \
         bytes=9876 client_id=\"job 7\" trace=4bf92f3577b34da6a3ce929d0e0e4736\n"
    );
    let json: serde_json::Value = serde_json::from_str(&written(&full(), AccessFormat::Json)).unwrap();
    assert_eq!(
        json,
        serde_json::json!({
            "time": "2023-11-14T22:13:20.123Z", "id": "0000000000000abc", "status": 200, "outcome": "complete", "method": "POST",
            "path": "/v1/chat/completions", "model": "llama", "key": "k7", "tenant": "physics", "replica": "n0/1", "attempts": 2,
            "tokens_in": 1200, "tokens_out": 64, "tokens_cached": 1024, "queued": 0.25, "first": 0.312, "total": 65.0, "bytes": 9876,
            "client_id": "job 7", "trace": "4bf92f3577b34da6a3ce929d0e0e4736"
        })
    );
}

#[test]
fn the_outcome_is_a_word_for_how_it_ended() {
    let of = |line: AccessLine| {
        let json: serde_json::Value = serde_json::from_str(&written(&line, AccessFormat::Json)).unwrap();
        (json["outcome"].as_str().unwrap().to_owned(), json["cause"].as_str().map(str::to_owned))
    };
    let pair = |outcome: &str, cause: Option<&str>| (outcome.to_owned(), cause.map(str::to_owned));
    assert_eq!(of(line()), pair("client_left", None), "before there was an answer");
    assert_eq!(of(AccessLine { status: Some(200), ..line() }), pair("complete", None), "the router's own");
    assert_eq!(of(AccessLine { status: Some(401), cause: Some("unauthenticated"), ..line() }), pair("refused", Some("unauthenticated")));
    let broken = AccessLine { status: Some(200), outcome: Some(AnswerOutcome::Broken), cause: Some("engine_lost"), ..line() };
    assert_eq!(of(broken), pair("broken", Some("engine_lost")));
    assert_eq!(of(AccessLine { status: Some(413), ..line() }), pair("refused", Some("too_large")));
    assert_eq!(of(AccessLine { status: Some(404), ..line() }), pair("refused", Some("no_route")));
    let engines = AccessLine { status: Some(400), outcome: Some(AnswerOutcome::of_status(400)), ..line() };
    assert_eq!(of(engines), pair("rejected", Some("engine")));
}

#[test]
fn a_client_cannot_forge_access_lines() {
    let forged = "m\" status=200\n2023-11-14T22:13:20.123Z id=1\r\t\u{1b}[31m\u{85}\u{2028}\\ü=";
    let forger = AccessLine { model: Some(cut(forged).into()), key: forged.into(), client_id: Some(forged.into()), ..line() };
    let text = written(&forger, AccessFormat::Text);
    assert!(text.is_ascii() && text.lines().count() == 1 && !text.contains('\u{1b}'), "{text}");
    assert!(text.contains(r#"model="m\" status=200\u000a2023-"#), "{text}");
    let json: serde_json::Value = serde_json::from_str(&written(&forger, AccessFormat::Json)).unwrap();
    assert_eq!((json["model"].as_str(), json["key"].as_str()), (Some(forged), Some(forged)));
    let long = AccessLine { model: Some(cut(&"ü".repeat(10_000)).into()), path: Some(cut(&"x".repeat(9000)).into()), ..line() };
    assert!(written(&long, AccessFormat::Text).len() < 1200);
}

proptest! {
    #[test]
    fn an_access_line_stays_one_line_and_valid_json(name: String, key: String) {
        let named = AccessLine { model: Some(cut(&name).into()), tenant: key.as_str().into(), key: key.as_str().into(), ..line() };
        let text = written(&named, AccessFormat::Text);
        prop_assert!(text.ends_with('\n') && text.bytes().filter(|byte| byte.is_ascii_control()).count() == 1);
        let json: serde_json::Value = serde_json::from_str(&written(&named, AccessFormat::Json)).unwrap();
        prop_assert_eq!(json["model"].as_str(), Some(cut(&name)));
    }
}

#[tokio::test]
async fn an_entry_is_written_when_its_last_holder_drops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let (log, writing) = AccessLog::start(AccessFormat::Text, &path, Counter::default()).unwrap();
    let entry = log.start_entry(&Method::GET, Some(&PathAndQuery::from_static("/v1/models?x=1")), &HeaderMap::new(), None);
    let held = entry.clone();
    entry.set_status(200, Some(12));
    drop(entry);
    let other = log.start_entry(&Method::GET, None, &HeaderMap::new(), None);
    drop(other);
    held.set_status(200, Some(13));
    drop(held);
    writing.flush().await;
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].contains("outcome=client_left") && lines[1].contains("path=/v1/models ") && lines[1].ends_with("bytes=13"), "{text}");
}

#[tokio::test]
async fn a_disabled_access_log_still_remembers_refusals() {
    let (log, writing) = AccessLog::start(AccessFormat::Off, "/no/such/folder/log".as_ref(), Counter::default()).unwrap();
    let entry = log.start_entry(&Method::POST, None, &HeaderMap::new(), None);
    entry.record_refusal("malformed");
    entry.set_status(400, Some(12));
    assert!(log.refusals().since(0).is_none());
    drop(entry);
    assert_eq!(log.refusals().since(0).unwrap().1.len(), 1);
    writing.flush().await;
    assert!(AccessLog::default().start_entry(&Method::GET, None, &HeaderMap::new(), None).0.is_none(), "a log for nobody");
}
