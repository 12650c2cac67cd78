use hostler_prompt::Form;

use super::*;
use crate::prompt::files::encoder;
use crate::prompt::tests::bundle;

const SECOND: Duration = Duration::from_secs(1);

fn hash(number: usize) -> FilesHash {
    let mut hash = FilesHash::default();
    hash[..8].copy_from_slice(&(number as u64).to_be_bytes());
    hash
}

fn reader(files: FilesHash) -> Reader {
    Reader { files, dialect: Dialect::Python }
}

fn piece(offset: u64, data: &[u8]) -> FilesPiece {
    FilesPiece { offset, content: Ok(data.to_vec().into()) }
}

fn ready() -> Made {
    Made::Encoder(Arc::new(encoder(&bundle(0), 1024).unwrap()))
}

/// A table in which files stand ready, and the life of those files.
fn with_encoder(files: FilesHash, now: Instant) -> (Table, Life) {
    let mut table = Table::default();
    table.offered(files, 2, false, now);
    let (life, _) = table.part(&files, piece(0, b"ab"), now).unwrap();
    table.made(&files, life, ready(), now);
    (table, life)
}

#[test]
fn files_are_asked_for_once_while_they_come() {
    let (mut table, now, files) = (Table::default(), Instant::now(), hash(1));
    assert_eq!(table.standing(&reader(files), now), Standing::Missing);
    assert_eq!(table.offered(files, 4, false, now), Next::Fetch);
    assert_eq!(table.offered(files, 4, false, now), Next::Nothing);
    assert_eq!(table.standing(&reader(files), now), Standing::Loading);
    assert!(table.part(&files, piece(0, b"ab"), now).is_none());
    let (life, content) = table.part(&files, piece(2, b"cd"), now).unwrap();
    assert_eq!(content, b"abcd");
    assert_eq!(table.standing(&reader(files), now), Standing::Loading);
    assert_eq!(table.offered(files, 4, false, now), Next::Nothing);
    table.made(&files, life, ready(), now);
    assert_eq!(table.standing(&reader(files), now), Standing::Unproved);
    assert_eq!(table.offered(files, 4, true, now), Next::Nothing);
}

#[test]
fn a_transfer_that_stalls_is_asked_for_again_by_the_next_offer() {
    let (mut table, now, files) = (Table::default(), Instant::now(), hash(1));
    table.offered(files, 4, false, now);
    table.part(&files, piece(0, b"ab"), now);
    let later = now + 10 * SECOND;
    assert_eq!(table.standing(&reader(files), later), Standing::Missing);
    assert_eq!(table.offered(files, 4, false, later), Next::Fetch);
    assert!(table.part(&files, piece(0, b"abcd"), later).is_some(), "it begins from the start");
}

#[test]
fn a_transfer_that_breaks_is_asked_for_again_after_a_pause() {
    let (mut table, now, files) = (Table::default(), Instant::now(), hash(1));
    table.offered(files, 4, false, now);
    assert!(table.part(&files, piece(1, b"ab"), now).is_none());
    assert_eq!(table.standing(&reader(files), now), Standing::Missing);
    assert!(table.part(&files, piece(0, b"abcd"), now).is_none(), "what was still on its way is passed over");
    assert_eq!(table.offered(files, 4, false, now + 9 * SECOND), Next::Nothing);
    assert_eq!(table.offered(files, 4, false, now + 10 * SECOND), Next::Fetch);
}

#[test]
fn files_on_disk_are_read_and_if_they_are_damaged_asked_for() {
    let (mut table, now, files) = (Table::default(), Instant::now(), hash(1));
    let Next::Read(life) = table.offered(files, 4, true, now) else { panic!("they are on disk") };
    assert_eq!(table.standing(&reader(files), now), Standing::Loading);
    table.made(&files, life, Made::NotOnDisk, now);
    assert_eq!(table.offered(files, 4, false, now), Next::Fetch);
}

#[test]
fn files_that_are_too_large_or_empty_are_not_asked_for() {
    let (mut table, now) = (Table::default(), Instant::now());
    for (number, bytes) in [0, BUNDLE_BYTES as u64 + 1, u64::MAX].into_iter().enumerate() {
        assert_eq!(table.offered(hash(number), bytes, false, now), Next::Nothing);
        assert!(matches!(table.standing(&reader(hash(number)), now), Standing::Unusable(_)), "{bytes}");
    }
    assert_eq!(table.offered(hash(9), BUNDLE_BYTES as u64, false, now), Next::Fetch);
}

#[test]
fn only_so_many_transfers_run_at_once_and_one_that_stalls_makes_room() {
    let (mut table, now) = (Table::default(), Instant::now());
    for number in 0..TRANSFERS {
        assert_eq!(table.offered(hash(number), 4, false, now), Next::Fetch);
    }
    assert_eq!(table.offered(hash(TRANSFERS), 4, false, now), Next::Nothing);
    assert_eq!(table.standing(&reader(hash(TRANSFERS)), now), Standing::Missing);
    assert_eq!(table.offered(hash(TRANSFERS), 4, false, now + 10 * SECOND), Next::Fetch);
}

#[test]
fn the_model_wanted_least_recently_makes_room_for_another_one_but_not_at_once() {
    let now = Instant::now();
    let (mut table, life) = with_encoder(hash(0), now);
    for number in 1..MODELS {
        table.offered(hash(number), 4, true, now + SECOND);
    }
    assert_eq!(table.offered(hash(MODELS), 4, true, now + SECOND), Next::Nothing);
    assert_eq!(table.standing(&reader(hash(MODELS)), now), Standing::Missing);
    let later = now + KEPT_FOR;
    assert!(matches!(table.offered(hash(MODELS), 4, true, later), Next::Read(_)));
    assert_eq!(table.standing(&reader(hash(0)), later), Standing::Missing);
    table.set_proof(&reader(hash(0)), life, Ok(Forms::ALL));
    assert!(table.proved(&reader(hash(0)), later).is_none());
}

#[test]
fn a_model_in_use_is_wanted() {
    let now = Instant::now();
    let (mut table, life) = with_encoder(hash(0), now);
    table.set_proof(&reader(hash(0)), life, Ok(Forms::ALL));
    for number in 1..MODELS {
        table.offered(hash(number), 4, true, now + SECOND);
    }
    let later = now + SECOND + KEPT_FOR;
    assert!(table.proved(&reader(hash(0)), later).is_some());
    assert!(matches!(table.offered(hash(MODELS), 4, true, later), Next::Read(_)));
    assert_eq!(table.standing(&reader(hash(0)), later), Standing::Proved);
}

#[test]
fn what_was_begun_in_an_earlier_stay_is_ignored() {
    let (mut table, now) = (Table::default(), Instant::now());
    let Next::Read(life) = table.offered(hash(0), 4, true, now) else { panic!("it is on disk") };
    for number in 1..MODELS {
        table.offered(hash(number), 4, true, now + SECOND);
    }
    table.offered(hash(MODELS), 4, true, now + KEPT_FOR);
    table.made(&hash(0), life, ready(), now);
    assert_eq!(table.standing(&reader(hash(0)), now), Standing::Missing, "it was dropped meanwhile");
    table.offered(hash(0), 4, true, now + 3 * KEPT_FOR);
    table.made(&hash(0), life, ready(), now);
    assert_eq!(table.standing(&reader(hash(0)), now), Standing::Loading, "it is being read once more");
}

#[test]
fn an_encoder_is_compared_by_one_at_a_time_and_used_when_it_is_proved() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    assert!(table.begin_proof(&reader(files), now).is_some());
    assert!(table.begin_proof(&reader(files), now).is_none());
    table.end_proof(&reader(files), life);
    assert_eq!(table.standing(&reader(files), now), Standing::Unproved);
    assert!(table.proved(&reader(files), now).is_none());
    assert!(table.begin_proof(&reader(files), now).is_some());
    table.set_proof(&reader(files), life, Ok(Forms::ALL));
    table.end_proof(&reader(files), life);
    assert_eq!(table.standing(&reader(files), now), Standing::Proved);
    assert!(table.proved(&reader(files), now).is_some() && table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn an_engine_that_could_not_be_asked_is_told_of_once_and_followed_by_a_pause() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    table.begin_proof(&reader(files), now);
    assert!(table.silence(&reader(files), life, now));
    table.end_proof(&reader(files), life);
    assert!(table.begin_proof(&reader(files), now + SECOND / 2).is_none());
    assert!(table.begin_proof(&reader(files), now + SECOND).is_some());
    assert!(!table.silence(&reader(files), life, now + SECOND));
}

#[test]
fn an_encoder_that_differs_is_neither_used_nor_compared_again() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    table.begin_proof(&reader(files), now);
    table.set_proof(&reader(files), life, Err("the third token".into()));
    table.end_proof(&reader(files), life);
    assert_eq!(table.standing(&reader(files), now), Standing::Different("the third token".into()));
    assert!(table.proved(&reader(files), now).is_none() && table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn an_encoder_that_agrees_about_some_forms_is_used_for_those_and_counts_as_proved() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    let some = Forms::ALL.without(Forms::default().with(Form::Continued));
    table.begin_proof(&reader(files), now);
    table.set_proof(&reader(files), life, Ok(some));
    table.end_proof(&reader(files), life);
    assert_eq!(table.proved(&reader(files), now).unwrap().1, some);
    let standing = table.standing(&reader(files), now);
    assert!(standing.is_proved() && standing == Standing::Partly(some));
    assert_eq!(standing.reason(), "continued messages are placed by text");
    assert_eq!(table.figures(now).0[3], ("proved", 1));
    assert!(table.begin_proof(&reader(files), now).is_none());
}

#[test]
fn models_are_counted_by_their_standing() {
    let now = Instant::now();
    let (mut table, _) = with_encoder(hash(0), now);
    table.offered(hash(1), 4, false, now);
    table.offered(hash(2), 4, true, now);
    table.offered(hash(3), 0, false, now);
    let (models, _) = table.figures(now);
    assert_eq!(models, [("missing", 0), ("loading", 2), ("unproved", 1), ("proved", 0), ("different", 0), ("unusable", 1)]);
}

#[test]
fn what_was_proved_with_one_front_end_is_not_believed_of_the_other() {
    let (now, files) = (Instant::now(), hash(1));
    let (mut table, life) = with_encoder(files, now);
    let (python, rust) = (reader(files), Reader { files, dialect: Dialect::Rust });
    assert!(table.begin_proof(&python, now).is_some() && table.begin_proof(&rust, now).is_some());
    table.set_proof(&python, life, Ok(Forms::ALL));
    assert!(table.proved(&python, now).is_some() && table.proved(&rust, now).is_none());
    assert_eq!(table.standing(&rust, now), Standing::Unproved);
    table.set_proof(&rust, life, Err("a line end".into()));
    assert_eq!((table.standing(&python, now), table.standing(&rust, now).word()), (Standing::Proved, "different"));
    assert_eq!(table.figures(now).0[4], ("different", 1));
}
