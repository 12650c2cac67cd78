use std::sync::atomic::{AtomicUsize, Ordering};

use hostler_placement::affinity::ReplicaSlot;
use hostler_prompt::{Dialect, PromptForm, PromptForms};

use super::reading::ReadingPlan;
use super::*;
use crate::cache_level::CacheLevel;
use crate::placement::tests::{FILES, Fixture};
use crate::prompt::tests::{Answers, prove};
use crate::prompt::{EncoderKey, FilesHash, MAX_RENDERED_BYTES};

/// A prompt with known text but unknown tokens.
pub(in crate::placement) fn text(text: &str) -> Prompt {
    Prompt::from_text(request(text), "")
}

/// A prompt for the model of this name.
pub(in crate::placement) fn for_model(name: &str) -> Prompt {
    Prompt::from_text(PlacementRequest { model: Some(name.into()), ..request("") }, "")
}

/// A prompt whose answer streams.
pub(in crate::placement) fn stream(text: &str) -> Prompt {
    Prompt::from_text(PlacementRequest { is_stream: true, ..request(text) }, "")
}

/// A prompt without text and with this many tokens, as replicas with these files and the Python
/// front-end see them.
pub(in crate::placement) fn exact(tokens: u32, files: FilesHash) -> Prompt {
    let exact = TokenizedPrompt {
        rules: python(files).into(),
        equivalent_rules: None,
        tokens: (0..tokens).collect(),
        unread_tokens: 0,
        total_tokens: tokens,
        chain: KeyChain::new("", ""),
        keys: Mutex::default(),
    };
    Prompt { tokenized: Some(exact), ..text("") }
}

/// The same whose answer streams.
pub(in crate::placement) fn exact_stream(tokens: u32, files: FilesHash) -> Prompt {
    Prompt { tokenized: exact(tokens, files).tokenized, ..stream("") }
}

fn python(files: FilesHash) -> EncoderKey {
    EncoderKey { files, dialect: Dialect::Python }
}

fn request(text: &str) -> PlacementRequest {
    let text = Some(text).filter(|text| !text.is_empty()).map(|text| Bytes::from(text.to_owned()));
    PlacementRequest {
        model: Some("m".into()),
        path: "/v1/completions".into(),
        prompt_parts: text.into_iter().collect(),
        ..PlacementRequest::default()
    }
}

#[test]
fn text_is_estimated_by_bytes_and_keyed_by_blocks() {
    let prompt = text(&"a".repeat(1001));
    assert_eq!((prompt.token_count(), prompt.text_keys().len()), (251, 3));
    assert!(!prompt.is_exact_for(python(FILES).into()) && prompt.token_keys(16).is_empty());
    assert_eq!((text("").token_count(), text("").text_keys().len()), (0, 0));
}

#[test]
fn texts_of_one_model_share_the_keys_of_prefixes() {
    let (short, long) = (text(&"a".repeat(600)), text(&"a".repeat(1200)));
    assert_eq!(short.text_keys()[..], long.text_keys()[..2]);
    let parts =
        Prompt::from_text(PlacementRequest { prompt_parts: vec!["a".repeat(300).into(), "a".repeat(300).into()], ..request("") }, "");
    assert_eq!(parts.text_keys()[..], short.text_keys()[..], "wherever it is cut");
    let other = Prompt::from_text(PlacementRequest { model: Some("other".into()), ..request(&"a".repeat(600)) }, "");
    assert_ne!(other.text_keys()[0], short.text_keys()[0]);
}

#[test]
fn tokens_have_keys_for_each_block_size() {
    let prompt = exact(100, FILES);
    assert!(prompt.is_exact_for(python(FILES).into()) && !prompt.is_exact_for(python([8; 32]).into()));
    let rust = TokenRules { files: Some(FILES), dialect: Dialect::Rust };
    assert!(!prompt.is_exact_for(TokenRules { files: None, dialect: Dialect::Python }));
    assert!(!prompt.is_exact_for(rust));
    let Prompt { tokenized: Some(exact), .. } = exact(100, FILES) else { panic!("it has tokens") };
    let both = Prompt { tokenized: Some(TokenizedPrompt { equivalent_rules: Some(rust), ..exact }), ..text("") };
    assert!(both.is_exact_for(rust) && both.is_exact_for(python(FILES).into()));
    assert_eq!((prompt.token_keys(16).len(), prompt.token_keys(48).len(), prompt.token_keys(101).len()), (6, 2, 0));
    assert!(Arc::ptr_eq(&prompt.token_keys(16), &prompt.token_keys(16)), "they are made once");
    assert_eq!(prompt.token_count(), 100);
}

#[test]
fn a_request_counts_once_however_often_it_is_placed() {
    let (prompt, mut counted) = (exact(100, FILES), Vec::new());
    assert_eq!(prompt.token_keys(48).len(), 2);
    for _ in 0..2 {
        prompt.arrivals(|keys, size| {
            counted.push((keys.len(), size));
            Arrivals::empty()
        });
    }
    assert_eq!(counted, [(2, 48)]);
    text(&"a".repeat(600)).arrivals(|keys, size| {
        assert_eq!((keys.len(), size), (2, TEXT_BLOCK_TOKENS));
        Arrivals::empty()
    });
}

#[tokio::test(start_paused = true)]
async fn prompts_are_tokenized_only_where_the_choice_depends_on_it() {
    let hello = || request(&"Hello, engine! ".repeat(10));
    let (one, _) = Fixture::known(1).await;
    assert_eq!(one.placer.plan_reading(&Prompt::from_text(hello(), "")), None, "there is no choice");
    let (two, _) = Fixture::known(2).await;
    let plan = |request: PlacementRequest| two.placer.plan_reading(&Prompt::from_text(request, ""));
    assert_eq!(
        plan(hello()),
        Some(ReadingPlan { reader: Some(python(FILES)), lora_adapter: String::new(), block_sizes: vec![16], may_render: false })
    );
    assert_eq!(plan(request("a prompt of one block and a half at most")), None, "there is too little to find");
    assert_eq!(plan(PlacementRequest { model: Some("other".into()), ..hello() }), None, "nobody serves it");
    assert_eq!(Fixture::approximate(2).await.placer.plan_reading(&Prompt::from_text(hello(), "")), None, "nobody says what is cached");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_without_tokenizer_says_so() {
    let (fixture, _) = Fixture::known(2).await;
    let body = Bytes::from_static(br#"{"model":"m","prompt":"Hello, engine, how are you?"}"#);
    let prompt = fixture.placer.read_prompt(PlacementRequest { body, ..request(&"Hello, engine! ".repeat(10)) }, false).await;
    assert_eq!((prompt.fallback_reason, prompt.is_exact_for(python(FILES).into())), ("tokenizer not ready", false));
    let prompt = fixture.placer.read_prompt(request("short"), false).await;
    assert_eq!(prompt.fallback_reason, "");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_of_an_unproved_form_is_placed_by_text() {
    let (fixture, _) = Fixture::known(2).await;
    prove(&fixture.placer.prompts, &python(FILES), PromptForms::ALL.without(PromptForms::default().with(PromptForm::Continued)));
    let read = |body: &'static str| {
        let request = PlacementRequest {
            path: "/v1/chat/completions".into(),
            body: Bytes::from_static(body.as_bytes()),
            ..request(&"a".repeat(400))
        };
        fixture.placer.read_prompt(request, false)
    };
    let plain = read(r#"{"messages":[{"role":"user","content":"hello world"}]}"#).await;
    assert_eq!((plain.fallback_reason, plain.is_exact_for(python(FILES).into())), ("", true));
    let continued = r#"{"messages":[{"role":"user","content":"hello"}],"add_generation_prompt":false,"continue_final_message":true}"#;
    let prompt = read(continued).await;
    assert_eq!((prompt.fallback_reason, prompt.is_exact_for(python(FILES).into())), ("continued messages not proved", false));
    assert_eq!(fixture.choose(&prompt).level, CacheLevel::Text);
    // An engine with the other front-end agrees about the prompt. The first one's cache is still
    // known by text alone.
    let rust = EncoderKey { files: FILES, dialect: Dialect::Rust };
    prove(&fixture.placer.prompts, &rust, PromptForms::ALL);
    assert!(!read(continued).await.is_exact_for(rust.into()), "nobody has it");
    fixture.add_with_rust(2).await;
    let prompt = read(continued).await;
    assert_eq!((prompt.fallback_reason, prompt.is_exact_for(rust.into()), prompt.is_exact_for(python(FILES).into())), ("", true, false));
    let plain = read(r#"{"messages":[{"role":"user","content":"hello world"}]}"#).await;
    assert!(plain.is_exact_for(rust.into()) && plain.is_exact_for(python(FILES).into()));
}

/// A completion of this text, to be read.
fn completion(text: &str) -> PlacementRequest {
    PlacementRequest { body: format!(r#"{{"model":"m","prompt":"{text}"}}"#).into(), ..request(text) }
}

/// Two replicas whose tokenizer is proved.
async fn proved() -> (Fixture, Vec<ReplicaSlot>) {
    let (fixture, slots) = Fixture::known(2).await;
    prove(&fixture.placer.prompts, &python(FILES), PromptForms::ALL);
    (fixture, slots)
}

fn read_tokens(prompt: &Prompt) -> &[u32] {
    &prompt.tokenized.as_ref().unwrap().tokens
}

#[tokio::test(start_paused = true)]
async fn a_long_prompt_is_tokenized_as_far_as_cached() {
    let (fixture, slots) = proved().await;
    let text = "hello world ".repeat(2000);
    let unknown = fixture.placer.read_prompt(completion(&text), false).await;
    assert!(read_tokens(&unknown).len() < 100, "nobody has its first piece");
    assert!((3900..4100).contains(&unknown.token_count()), "{}", unknown.token_count());
    assert_eq!(unknown.block_count(16), unknown.token_count() / 16);
    assert!(unknown.is_estimate());
    drop(unknown);
    let waits = fixture.placer.read_prompt(completion(&text), true).await;
    assert_eq!((waits.token_count(), waits.is_estimate()), (4000, false), "one that will wait is read whole");
    let tools = PlacementRequest { prompt_parts: vec!["And then? ".repeat(20).into()], ..completion(&text) };
    assert_eq!(fixture.placer.read_prompt(tools, false).await.token_count(), 4000, "so is one whose text is little of it");

    let whole: Vec<u32> = (0..4000).map(|token| 1 + token % 2).collect();
    let keys = token_keys(KeyChain::new("", ""), &whole, 16);
    fixture.index.store(slots[1], &keys[..100]);
    let known = fixture.placer.read_prompt(completion(&text), false).await;
    assert!((1600..1900).contains(&read_tokens(&known).len()), "{}", read_tokens(&known).len());
    assert_eq!(read_tokens(&known)[..], whole[..read_tokens(&known).len()]);
    let chosen = fixture.choose(&known);
    assert_eq!((&*chosen.replica.id, chosen.decision.choice().candidate.matched), ("n/1", 1600));

    fixture.index.store(slots[1], &keys);
    let cached = fixture.placer.read_prompt(completion(&text), false).await;
    assert_eq!((read_tokens(&cached), cached.token_count()), (&whole[..], 4000));
}

#[tokio::test(start_paused = true)]
async fn concurrent_long_prompts_with_a_common_prefix_stay_together() {
    let (fixture, _) = proved().await;
    let document = "hello world ".repeat(2000);
    let alone = fixture.placer.read_prompt(completion(&document), false).await;
    assert!(
        read_tokens(&fixture.placer.read_prompt(completion(&document), false).await).len() >= 4000,
        "the first is known before it is sent"
    );
    drop(alone);
    let (first, before) =
        (fixture.placer.read_prompt(completion(&document), false).await, fixture.placer.read_prompt(completion(&document), false).await);
    let chosen = fixture.choose(&first);
    let _in_flight = fixture.placer.count_in_flight(&first, &chosen, tokio::time::Instant::now());
    let matched = |prompt: &Prompt| {
        let again = fixture.choose(prompt);
        let of_first = again.decision.scored.iter().find(|scored| scored.candidate.replica == chosen.decision.choice().candidate.replica);
        of_first.unwrap().candidate.matched
    };
    assert!(matched(&before) > 3800, "it came before the first was sent");
    let question = fixture.placer.read_prompt(completion(&format!("{document}{}", "world ".repeat(500))), false).await;
    assert!((3900..4500).contains(&read_tokens(&question).len()), "read as far as the text of the first: {}", read_tokens(&question).len());
    assert!((3600..4200).contains(&matched(&question)), "{}", matched(&question));
    let other = fixture.placer.read_prompt(completion(&format!("{}{}", "hello world ".repeat(100), "world ".repeat(3000))), false).await;
    assert!(read_tokens(&other).len() < 500, "{}", read_tokens(&other).len());
    assert!((100..300).contains(&matched(&other)), "{}", matched(&other));
}

/// A chat of this text.
fn chat(text: &str) -> PlacementRequest {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    PlacementRequest { path: "/v1/chat/completions".into(), body: body.into(), ..request(text) }
}

/// Engines that make the tokens 0 to 999 of each chat, and how many chats they were asked about.
fn thousand_tokens() -> (Answers, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = asked.clone();
    let tokens: Vec<u32> = (0..1000).collect();
    let answer = move |path: &str, _: &[u8]| {
        counter.fetch_add(usize::from(path == "/v1/chat/completions/render"), Ordering::Relaxed);
        let rendered = format!(r#"{{"token_ids":{tokens:?},"features":null}}"#);
        (200, if path == "/v1/completions/render" { format!("[{rendered}]") } else { rendered }.into_bytes())
    };
    (Box::new(answer), asked)
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_only_engines_read_is_placed_by_their_tokens() {
    let (fixture, slots) = Fixture::known(3).await;
    let (answers, asked) = thousand_tokens();
    fixture.render_with(answers).await;
    let whole: Vec<u32> = (0..1000).collect();
    fixture.index.store(slots[1], &token_keys(KeyChain::new("", "salt"), &whole, 16)[..40]);
    let request = PlacementRequest { cache_salt: "salt".into(), ..chat(&"a".repeat(2000)) };
    let prompt = fixture.placer.read_prompt(request, false).await;
    let chosen = fixture.choose(&prompt);
    assert_eq!((&*chosen.replica.id, chosen.level, chosen.decision.choice().candidate.matched), ("n/1", CacheLevel::Exact, 640));
    assert_eq!((prompt.token_count(), prompt.fallback_reason, asked.load(Ordering::Relaxed)), (1000, "", 1), "one engine was asked");
    // A replica with the other front-end may read it otherwise.
    fixture.add_with_rust(3).await;
    let of_rust = |replica: &Arc<Replica>| replica.has_rust_front_end() && prompt.is_exact_for(replica.state.token_rules());
    assert!(!fixture.fleet.view().replicas.iter().any(of_rust));
}

#[tokio::test(start_paused = true)]
async fn engines_are_not_asked_about_prompts_that_could_harm_or_gain_nothing() {
    let (fixture, _) = Fixture::known(2).await;
    let (answers, asked) = thousand_tokens();
    fixture.render_with(answers).await;
    let long = "a".repeat(2000);
    let image = r#"[{"type":"image_url","image_url":{"url":"https://x/y.png"}}]"#;
    let requests = [
        ("may crash engines", PlacementRequest { is_suspect: true, ..chat(&long) }),
        ("has a medium to fetch", PlacementRequest { body: image.into(), ..chat(&long) }),
        ("is too long", PlacementRequest { body: "a".repeat(MAX_RENDERED_BYTES + 1).into(), ..chat(&long) }),
        ("is short", chat("short")),
        ("is of another route", PlacementRequest { path: "/v1/embeddings".into(), ..chat(&long) }),
    ];
    for (why, request) in requests {
        let prompt = fixture.placer.read_prompt(request, false).await;
        assert_eq!((asked.load(Ordering::Relaxed), fixture.choose(&prompt).level == CacheLevel::Exact), (0, false), "it {why}");
    }
    let (alone, _) = Fixture::known(1).await;
    let (answers, asked) = thousand_tokens();
    alone.render_with(answers).await;
    let _ = alone.placer.read_prompt(chat(&long), false).await;
    assert_eq!(asked.load(Ordering::Relaxed), 0, "there is no choice");
}

#[tokio::test(start_paused = true)]
async fn a_prompt_whose_rendering_fails_is_placed_by_text_and_says_why() {
    let (fixture, _) = Fixture::known(2).await;
    let answers: Answers = Box::new(|path, _| match path {
        "/v1/completions/render" => (200, br#"[{"token_ids":[1]}]"#.to_vec()),
        _ => (500, Vec::new()),
    });
    fixture.render_with(answers).await;
    for reason in ["rendering unusable", "rendering unusable", "rendering busy"] {
        let prompt = fixture.placer.read_prompt(chat(&"a".repeat(2000)), false).await;
        assert_eq!((prompt.fallback_reason, fixture.choose(&prompt).level), (reason, CacheLevel::Text));
    }
}

#[tokio::test(start_paused = true)]
async fn engines_are_asked_only_for_forms_that_no_encoder_may_read() {
    let (fixture, _) = Fixture::known(2).await;
    let (answers, asked) = thousand_tokens();
    fixture.render_with(answers).await;
    for index in 0..2 {
        fixture.restore_files(index).await;
    }
    prove(&fixture.placer.prompts, &python(FILES), PromptForms::default().with(PromptForm::Texts));
    let text = fixture.placer.read_prompt(completion(&"hello world ".repeat(20)), false).await;
    assert_eq!((asked.load(Ordering::Relaxed), text.is_exact_for(python(FILES).into())), (0, true));
    let chat = fixture.placer.read_prompt(chat(&"hello world ".repeat(20)), false).await;
    assert_eq!((asked.load(Ordering::Relaxed), chat.is_exact_for(python(FILES).into()), chat.token_count()), (1, true, 1000));
}

#[test]
fn text_after_the_first_medium_is_not_counted() {
    let image = r#"[{"type":"text","text":"What is this?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]"#;
    let (before, many) = (image.find("image_url").unwrap(), format!("{}{}", image, "A".repeat(100_000)));
    assert!(text(&many).token_count() as usize <= before / BYTES_PER_TOKEN + BYTES_PER_TOKEN, "{}", text(&many).token_count());
    let speaks = r#"[{"type":"text","text":"an \"image_url\" and \"base64\""}]"#;
    assert_eq!(text(speaks).token_count() as usize, speaks.len().div_ceil(BYTES_PER_TOKEN), "a text that only speaks of media is none");
}
