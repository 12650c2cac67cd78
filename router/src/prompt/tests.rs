use futures_util::FutureExt;
use hostler_proto::agent::v1::{PromptBundle, PromptFile};
use prost::Message;

use super::*;

pub(crate) use super::proof::tests::{Answers, serve};

pub(super) const TENANT: u64 = 1;

pub(super) fn file(name: &str, content: &str) -> PromptFile {
    PromptFile { name: name.into(), content: content.to_owned().into() }
}

/// A small model's files. Words are tokens; `first` is the number of the first word.
pub(super) fn bundle(first: u32) -> Vec<u8> {
    let words = ["[UNK]", "hello", "world", "you", "are", "a", "the", "is", "and"];
    let vocabulary: serde_json::Map<_, _> = words.iter().zip(first..).map(|(word, id)| ((*word).to_owned(), id.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]" },
    });
    let template = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}";
    let files =
        vec![file("tokenizer.json", &tokenizer.to_string()), file("tokenizer_config.json", "{}"), file("chat_template.jinja", template)];
    PromptBundle { files }.encode_to_vec()
}

pub(super) fn body(prompt: &str) -> Bytes {
    serde_json::json!({ "model": "m", "prompt": prompt }).to_string().into()
}

/// Sends the bundle in pieces, under the requested hash.
fn send(prompts: &Prompts, hash: FilesHash, bundle: &[u8]) {
    for (number, data) in bundle.chunks(100).enumerate() {
        let part = FilesPiece { offset: 100 * number as u64, content: Ok(data.to_vec().into()) };
        prompts.receive_part(&hash, part);
    }
}

/// Makes a proved encoder for these forms under the hash, whatever the files are.
pub(crate) fn prove(prompts: &Prompts, reader: &EncoderKey, forms: PromptForms) {
    let (mut table, now) = (prompts.0.table.lock(), Instant::now());
    if let OfferAction::Read(life) = table.offer(reader.files, 1, true, now) {
        let encoder = bundle::build_encoder(&bundle(0), SEGMENT_CACHE_BYTES).unwrap();
        table.finish_build(&reader.files, life, BuildOutcome::Encoder(Arc::new(encoder)), now);
    }
    let (life, _) = table.begin_proof(reader, now).unwrap();
    table.set_proof(reader, life, Ok(forms));
}

/// Waits until the status of the files is decided.
async fn decided(prompts: &Prompts, hash: FilesHash) -> EncoderStatus {
    loop {
        match prompts.status(&reader(hash)) {
            EncoderStatus::Loading => tokio::task::yield_now().await,
            standing => return standing,
        }
    }
}

pub(super) fn reader(files: FilesHash) -> EncoderKey {
    EncoderKey { files, dialect: Dialect::Python }
}

pub(super) async fn unproved(prompts: &Prompts, bundle: &[u8]) -> FilesHash {
    let hash = bundle::bundle_hash(bundle);
    prompts.offer_files(hash, bundle.len() as u64, &|| send(prompts, hash, bundle));
    assert_eq!(decided(prompts, hash).await, EncoderStatus::Unproved);
    hash
}

async fn proved(prompts: &Prompts) -> FilesHash {
    let hash = unproved(prompts, &bundle(0)).await;
    let (life, _) = prompts.0.table.lock().begin_proof(&reader(hash), Instant::now()).unwrap();
    prompts.0.table.lock().set_proof(&reader(hash), life, Ok(PromptForms::ALL));
    hash
}

pub(super) fn nothing_kept() -> Prompts {
    Prompts::new(PathBuf::new(), 1)
}

fn never() {
    panic!("nothing was to be asked for");
}

#[tokio::test]
async fn files_received_in_pieces_are_used_once_proved() {
    let prompts = nothing_kept();
    let hash = unproved(&prompts, &bundle(0)).await;
    assert_eq!(
        prompts.encode((TENANT, &reader(hash)), "/v1/completions", body("hello world"), |_| true).await.err(),
        Some(NotEncoded::NotProved)
    );
    let (life, _) = prompts.0.table.lock().begin_proof(&reader(hash), Instant::now()).unwrap();
    prompts.0.table.lock().set_proof(&reader(hash), life, Ok(PromptForms::ALL));
    let encoded = prompts.encode((TENANT, &reader(hash)), "/v1/completions", body("hello world"), |_| true).await.unwrap();
    assert_eq!(encoded.tokens, [1, 2]);
    assert_eq!(prompts.stats().encodes, 1);
}

#[tokio::test(start_paused = true)]
async fn files_with_a_wrong_hash_are_dropped_and_requested_again() {
    let prompts = nothing_kept();
    let (expected, other) = (bundle(0), bundle(1));
    let hash = bundle::bundle_hash(&expected);
    assert_eq!(expected.len(), other.len());
    prompts.offer_files(hash, expected.len() as u64, &|| send(&prompts, hash, &other));
    assert_eq!(decided(&prompts, hash).await, EncoderStatus::Missing);
    prompts.offer_files(hash, expected.len() as u64, &never);
    tokio::time::advance(Duration::from_secs(10)).await;
    unproved(&prompts, &expected).await;
}

#[tokio::test]
async fn files_without_a_tokenizer_are_unusable() {
    let prompts = nothing_kept();
    let bundle = PromptBundle { files: vec![file("chat_template.jinja", "")] }.encode_to_vec();
    let hash = bundle::bundle_hash(&bundle);
    prompts.offer_files(hash, bundle.len() as u64, &|| send(&prompts, hash, &bundle));
    assert!(matches!(decided(&prompts, hash).await, EncoderStatus::Unusable(why) if why.contains("tokenizer.json")));
}

#[tokio::test]
async fn an_unrequested_piece_is_ignored() {
    let prompts = nothing_kept();
    send(&prompts, bundle::bundle_hash(&bundle(0)), &bundle(0));
    assert_eq!(prompts.status(&reader(bundle::bundle_hash(&bundle(0)))), EncoderStatus::Missing);
}

#[tokio::test]
async fn a_restarted_router_finds_its_files_on_disk() {
    let cache = tempfile::tempdir().unwrap();
    let hash = unproved(&Prompts::new(cache.path().into(), 1), &bundle(0)).await;
    let restarted = Prompts::new(cache.path().into(), 1);
    restarted.offer_files(hash, bundle(0).len() as u64, &never);
    assert_eq!(decided(&restarted, hash).await, EncoderStatus::Unproved);
}

#[tokio::test]
async fn files_damaged_on_disk_are_requested_again() {
    let cache = tempfile::tempdir().unwrap();
    let hash = unproved(&Prompts::new(cache.path().into(), 1), &bundle(0)).await;
    let kept = std::fs::read_dir(cache.path().join("prompt")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(kept, bundle(7)).unwrap();
    let restarted = Prompts::new(cache.path().into(), 1);
    restarted.offer_files(hash, bundle(0).len() as u64, &never);
    assert_eq!(decided(&restarted, hash).await, EncoderStatus::Missing);
    unproved(&restarted, &bundle(0)).await;
}

/// Keeps the pool's only thread busy until the sender is dropped.
fn occupy(prompts: &Prompts) -> std::sync::mpsc::Sender<()> {
    let (free, wait) = std::sync::mpsc::channel();
    assert!(prompts.0.pool.run((TENANT, 1), move || wait.recv()).now_or_never().is_none());
    free
}

#[tokio::test]
async fn a_full_pool_refuses_until_it_has_room() {
    let prompts = nothing_kept();
    let reader = reader(proved(&prompts).await);
    let free = occupy(&prompts);
    let mut waiting = Vec::new();
    let refused = loop {
        let mut next = Box::pin(prompts.encode((TENANT, &reader), "/v1/completions", body("hello"), |_| true));
        match next.as_mut().now_or_never() {
            None => waiting.push(next),
            Some(refused) => break refused,
        }
    };
    assert_eq!(refused.err(), Some(NotEncoded::Busy));
    drop(free);
    drop(waiting);
    assert_eq!(prompts.encode((TENANT, &reader), "/v1/completions", body("hello"), |_| true).await.unwrap().tokens, [1]);
    let figures = prompts.stats();
    assert_eq!((figures.busy, figures.encodes), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_tokens_up_to_its_deadline() {
    let prompts = nothing_kept();
    let reader = reader(proved(&prompts).await);
    let free = occupy(&prompts);
    let mut encoding = Box::pin(prompts.encode((TENANT, &reader), "/v1/completions", body("hello"), |_| true));
    assert!(encoding.as_mut().now_or_never().is_none());
    tokio::time::advance(ENCODE_DEADLINE).await;
    assert_eq!(encoding.await.err(), Some(NotEncoded::Busy));
    drop(free);
}
