use hostler_prompt::PromptForm;

use super::*;
use crate::prompt::bundle::build_encoder;
use crate::prompt::tests::bundle;

const SECOND: Duration = Duration::from_secs(1);

fn hash(number: usize) -> FilesHash {
    let mut hash = FilesHash::default();
    hash[..8].copy_from_slice(&(number as u64).to_be_bytes());
    hash
}

fn reader(files: FilesHash) -> EncoderKey {
    EncoderKey { files, dialect: Dialect::Python }
}

fn piece(offset: u64, data: &[u8]) -> FilesPiece {
    FilesPiece { offset, content: Ok(data.to_vec().into()) }
}

fn ready() -> BuildOutcome {
    BuildOutcome::Encoder(Arc::new(build_encoder(&bundle(0), 1024).unwrap()))
}

/// A table with a ready encoder, and its generation.
fn with_encoder(files: FilesHash, now: Instant) -> (EncoderTable, Generation) {
    let mut table = EncoderTable::default();
    table.offer(files, 2, false, now);
    let (life, _) = table.receive_part(&files, piece(0, b"ab"), now).unwrap();
    table.finish_build(&files, life, ready(), now);
    (table, life)
}

#[test]
fn prompt_files_are_requested_once_while_in_transfer() {
    let (mut table, now, files) = (EncoderTable::default(), Instant::now(), hash(1));
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Missing);
    assert_eq!(table.offer(files, 4, false, now), OfferAction::Fetch);
    assert_eq!(table.offer(files, 4, false, now), OfferAction::Nothing);
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Loading);
    assert!(table.receive_part(&files, piece(0, b"ab"), now).is_none());
    let (life, content) = table.receive_part(&files, piece(2, b"cd"), now).unwrap();
    assert_eq!(content, b"abcd");
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Loading);
    assert_eq!(table.offer(files, 4, false, now), OfferAction::Nothing);
    table.finish_build(&files, life, ready(), now);
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Unproved);
    assert_eq!(table.offer(files, 4, true, now), OfferAction::Nothing);
}

#[test]
fn a_stalled_transfer_is_restarted_by_the_next_offer() {
    let (mut table, now, files) = (EncoderTable::default(), Instant::now(), hash(1));
    table.offer(files, 4, false, now);
    table.receive_part(&files, piece(0, b"ab"), now);
    let later = now + 10 * SECOND;
    assert_eq!(table.status(&reader(files), later), EncoderStatus::Missing);
    assert_eq!(table.offer(files, 4, false, later), OfferAction::Fetch);
    assert!(table.receive_part(&files, piece(0, b"abcd"), later).is_some(), "it begins from the start");
}

#[test]
fn a_broken_transfer_is_restarted_after_a_pause() {
    let (mut table, now, files) = (EncoderTable::default(), Instant::now(), hash(1));
    table.offer(files, 4, false, now);
    assert!(table.receive_part(&files, piece(1, b"ab"), now).is_none());
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Missing);
    assert!(table.receive_part(&files, piece(0, b"abcd"), now).is_none(), "what was still on its way is passed over");
    assert_eq!(table.offer(files, 4, false, now + 9 * SECOND), OfferAction::Nothing);
    assert_eq!(table.offer(files, 4, false, now + 10 * SECOND), OfferAction::Fetch);
}

#[test]
fn files_on_disk_are_used_unless_damaged() {
    let (mut table, now, files) = (EncoderTable::default(), Instant::now(), hash(1));
    let OfferAction::Read(life) = table.offer(files, 4, true, now) else { panic!("they are on disk") };
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Loading);
    table.finish_build(&files, life, BuildOutcome::NotOnDisk, now);
    assert_eq!(table.offer(files, 4, false, now), OfferAction::Fetch);
}

#[test]
fn files_too_large_or_empty_are_not_requested() {
    let (mut table, now) = (EncoderTable::default(), Instant::now());
    for (number, bytes) in [0, MAX_BUNDLE_BYTES as u64 + 1, u64::MAX].into_iter().enumerate() {
        assert_eq!(table.offer(hash(number), bytes, false, now), OfferAction::Nothing);
        assert!(matches!(table.status(&reader(hash(number)), now), EncoderStatus::Unusable(_)), "{bytes}");
    }
    assert_eq!(table.offer(hash(9), MAX_BUNDLE_BYTES as u64, false, now), OfferAction::Fetch);
}

#[test]
fn transfers_are_limited_and_stalled_ones_make_room() {
    let (mut table, now) = (EncoderTable::default(), Instant::now());
    for number in 0..MAX_TRANSFERS {
        assert_eq!(table.offer(hash(number), 4, false, now), OfferAction::Fetch);
    }
    assert_eq!(table.offer(hash(MAX_TRANSFERS), 4, false, now), OfferAction::Nothing);
    assert_eq!(table.status(&reader(hash(MAX_TRANSFERS)), now), EncoderStatus::Missing);
    assert_eq!(table.offer(hash(MAX_TRANSFERS), 4, false, now + 10 * SECOND), OfferAction::Fetch);
}

#[test]
fn the_least_recently_wanted_model_makes_room_after_a_while() {
    let now = Instant::now();
    let (mut table, life) = with_encoder(hash(0), now);
    for number in 1..MAX_MODELS {
        table.offer(hash(number), 4, true, now + SECOND);
    }
    assert_eq!(table.offer(hash(MAX_MODELS), 4, true, now + SECOND), OfferAction::Nothing);
    assert_eq!(table.status(&reader(hash(MAX_MODELS)), now), EncoderStatus::Missing);
    let later = now + MIN_RETENTION;
    assert!(matches!(table.offer(hash(MAX_MODELS), 4, true, later), OfferAction::Read(_)));
    assert_eq!(table.status(&reader(hash(0)), later), EncoderStatus::Missing);
    table.set_proof(&reader(hash(0)), life, Ok(PromptForms::ALL));
    assert!(table.proved_encoder(&reader(hash(0)), later).is_none());
}

#[test]
fn a_model_in_use_counts_as_wanted() {
    let now = Instant::now();
    let (mut table, life) = with_encoder(hash(0), now);
    table.set_proof(&reader(hash(0)), life, Ok(PromptForms::ALL));
    for number in 1..MAX_MODELS {
        table.offer(hash(number), 4, true, now + SECOND);
    }
    let later = now + SECOND + MIN_RETENTION;
    assert!(table.proved_encoder(&reader(hash(0)), later).is_some());
    assert!(matches!(table.offer(hash(MAX_MODELS), 4, true, later), OfferAction::Read(_)));
    assert_eq!(table.status(&reader(hash(0)), later), EncoderStatus::Proved);
}

#[test]
fn results_of_an_evicted_models_earlier_stay_are_ignored() {
    let (mut table, now) = (EncoderTable::default(), Instant::now());
    let OfferAction::Read(life) = table.offer(hash(0), 4, true, now) else { panic!("it is on disk") };
    for number in 1..MAX_MODELS {
        table.offer(hash(number), 4, true, now + SECOND);
    }
    table.offer(hash(MAX_MODELS), 4, true, now + MIN_RETENTION);
    table.finish_build(&hash(0), life, ready(), now);
    assert_eq!(table.status(&reader(hash(0)), now), EncoderStatus::Missing, "it was dropped meanwhile");
    table.offer(hash(0), 4, true, now + 3 * MIN_RETENTION);
    table.finish_build(&hash(0), life, ready(), now);
    assert_eq!(table.status(&reader(hash(0)), now), EncoderStatus::Loading, "it is being read once more");
}

#[test]
fn an_encoder_is_proved_once_at_a_time_before_use() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    assert!(table.begin_proof(&reader(files), now).is_some());
    assert!(table.begin_proof(&reader(files), now).is_none());
    table.end_proof(&reader(files), life);
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Unproved);
    assert!(table.proved_encoder(&reader(files), now).is_none());
    assert!(table.begin_proof(&reader(files), now).is_some());
    table.set_proof(&reader(files), life, Ok(PromptForms::ALL));
    table.end_proof(&reader(files), life);
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Proved);
    assert!(table.proved_encoder(&reader(files), now).is_some() && table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn an_unanswered_proof_is_reported_once_and_pauses() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    table.begin_proof(&reader(files), now);
    assert!(table.record_no_answer(&reader(files), life, now));
    table.end_proof(&reader(files), life);
    assert!(table.begin_proof(&reader(files), now + SECOND / 2).is_none());
    assert!(table.begin_proof(&reader(files), now + SECOND).is_some());
    assert!(!table.record_no_answer(&reader(files), life, now + SECOND));
}

#[test]
fn a_differing_encoder_is_neither_used_nor_proved_again() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    table.begin_proof(&reader(files), now);
    table.set_proof(&reader(files), life, Err("the third token".into()));
    table.end_proof(&reader(files), life);
    assert_eq!(table.status(&reader(files), now), EncoderStatus::Mismatch("the third token".into()));
    assert!(table.proved_encoder(&reader(files), now).is_none() && table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn a_partly_proved_encoder_is_used_for_those_forms() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    let some = PromptForms::ALL.without(PromptForms::default().with(PromptForm::Continued));
    table.begin_proof(&reader(files), now);
    table.set_proof(&reader(files), life, Ok(some));
    table.end_proof(&reader(files), life);
    assert_eq!(table.proved_encoder(&reader(files), now).unwrap().1, some);
    let standing = table.status(&reader(files), now);
    assert!(standing.is_proved() && standing == EncoderStatus::PartlyProved(some));
    assert_eq!(standing.reason(), "continued messages are placed by text");
    assert_eq!(table.stats(now).0[3], ("proved", 1));
    assert!(table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn models_are_counted_by_their_standing() {
    let now = Instant::now();
    let (mut table, _) = with_encoder(hash(0), now);
    table.offer(hash(1), 4, false, now);
    table.offer(hash(2), 4, true, now);
    table.offer(hash(3), 0, false, now);
    let (models, _) = table.stats(now);
    assert_eq!(models, [("missing", 0), ("loading", 2), ("unproved", 1), ("proved", 0), ("different", 0), ("unusable", 1)]);
}

#[test]
fn a_proof_holds_for_one_front_end_only() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    let (python, rust) = (reader(files), EncoderKey { files, dialect: Dialect::Rust });
    assert!(table.begin_proof(&python, now).is_some() && table.begin_proof(&rust, now).is_some());
    table.set_proof(&python, life, Ok(PromptForms::ALL));
    assert!(table.proved_encoder(&python, now).is_some() && table.proved_encoder(&rust, now).is_none());
    assert_eq!(table.status(&rust, now), EncoderStatus::Unproved);
    table.set_proof(&rust, life, Err("a line end".into()));
    assert_eq!((table.status(&python, now), table.status(&rust, now).as_str()), (EncoderStatus::Proved, "different"));
    assert_eq!(table.stats(now).0[4], ("different", 1));
}
