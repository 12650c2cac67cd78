//! Journals that were torn, changed, taken by others and finished.

use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::InputBounds;

fn input(folder: &Path, requests: usize) -> Input {
    let path = folder.join(format!("in{requests}"));
    let line = |id| format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/x\",\"body\":{{}}}}\n");
    fs::write(&path, (0..requests).map(line).collect::<String>()).unwrap();
    Input::check(&path, &InputBounds::default()).unwrap()
}

fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    (folder, output)
}

#[test]
fn answers_are_put_in_the_order_of_their_requests() {
    let (folder, output) = place();
    let (input, path) = (input(folder.path(), 3), Journal::path_for(&output));
    let mut journal = Journal::open(&path, &input).unwrap();
    for number in [2, 0, 1] {
        journal.append(number, format!("{{\"n\":{number}}}").as_bytes(), number == 2).unwrap();
    }
    assert!(journal.is_complete() && journal.failed() == 1);
    journal.finish(&output).unwrap();
    assert_eq!(fs::read_to_string(&output).unwrap(), "{\"n\":0}\n{\"n\":1}\n{\"n\":2}\n");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "input and output are left: {left:?}");
}

#[test]
fn a_torn_journal_keeps_every_answer_before_the_tear() {
    let (folder, output) = place();
    let (input, path) = (input(folder.path(), 3), Journal::path_for(&output));
    let mut journal = Journal::open(&path, &input).unwrap();
    let mut ends = vec![journal.end];
    for number in [1, 0] {
        journal.append(number, b"{\"a\": \"b c\"}", false).unwrap();
        ends.push(journal.end);
    }
    drop(journal);
    let whole = fs::read(&path).unwrap();
    for length in 0..=whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let mut journal = Journal::open(&path, &input).unwrap();
        let expected = ends[1..].iter().filter(|end| **end <= length as u64).count();
        assert_eq!(journal.answered(), expected, "{length} bytes");
        assert_eq!([journal.has(1), journal.has(0), journal.has(2)], [expected > 0, expected > 1, false]);
        journal.append(2, b"{}", false).unwrap();
        drop(journal);
        assert!(Journal::open(&path, &input).unwrap().has(2), "it goes on after {length} bytes");
    }
}

#[test]
fn a_line_zeroed_by_a_host_crash_ends_the_journal() {
    let (folder, output) = place();
    let (input, path) = (input(folder.path(), 3), Journal::path_for(&output));
    let mut journal = Journal::open(&path, &input).unwrap();
    journal.append(0, b"{}", false).unwrap();
    let kept = journal.end;
    journal.append(1, b"{\"text\":\"abc\"}", false).unwrap();
    let changed = journal.end - 5;
    journal.append(2, b"{}", false).unwrap();
    drop(journal);
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[0], changed).unwrap();
    let journal = Journal::open(&path, &input).unwrap();
    assert_eq!((journal.answered(), journal.end, journal.has(0)), (1, kept, true));
}

#[test]
fn answers_of_one_kind_are_written_apart() {
    let (folder, output) = place();
    let mut journal = Journal::open(&Journal::path_for(&output), &input(folder.path(), 3)).unwrap();
    for (number, is_failed) in [(2, false), (1, true), (0, false)] {
        journal.append(number, format!("{number}").as_bytes(), is_failed).unwrap();
    }
    for (wanted, expected) in [(false, "0\n2\n"), (true, "1\n")] {
        let mut text = Vec::new();
        let write = |line: &[u8]| {
            text.extend_from_slice(line);
            Ok::<_, FileError>(())
        };
        journal.write_answers(|is_failed| is_failed == wanted, write).unwrap();
        assert_eq!(text, expected.as_bytes());
    }
}

#[test]
fn a_journal_belongs_to_one_input_and_spares_other_files() {
    let (folder, output) = place();
    let path = Journal::path_for(&output);
    drop(Journal::open(&path, &input(folder.path(), 3)).unwrap());
    assert!(matches!(Journal::open(&path, &input(folder.path(), 4)), Err(FileError::OtherInput(_))));
    for text in ["something\n", "something", "{\"format\":\"other\"}\n"] {
        fs::write(&path, text).unwrap();
        assert!(matches!(Journal::open(&path, &input(folder.path(), 3)), Err(FileError::NoJournal(_))), "{text}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
}

#[test]
fn a_journal_is_open_in_one_process_at_a_time() {
    let (folder, output) = place();
    let (input, path) = (input(folder.path(), 1), Journal::path_for(&output));
    let journal = Journal::open(&path, &input).unwrap();
    assert!(matches!(Journal::open(&path, &input), Err(FileError::InUse(_))));
    drop(journal);
    assert!(Journal::open(&path, &input).is_ok());
}

proptest! {
    #[test]
    fn a_journal_line_is_read_as_written(number in any::<usize>(), is_failed: bool, answer in "[^\n]{0,40}") {
        let entry = Entry { number, is_failed, answer: answer.as_bytes() };
        let line = write_entry(&entry);
        prop_assert_eq!(parse_entry(&line), Some(entry));
        prop_assert_eq!(&line[prefix(&entry).len()..line.len() - 1], answer.as_bytes());
    }

    #[test]
    fn no_bytes_make_the_journal_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        let _ = parse_entry(&bytes);
    }
}
