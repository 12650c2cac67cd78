use super::*;

fn holder(key: &str, model: &str) -> UsageHolder {
    UsageHolder { key: key.into(), tenant: "t".into(), model: model.into() }
}

fn counts(prompt: u64, answer: u64) -> TokenCounts {
    TokenCounts { requests: 1, failed: 0, prompt_tokens: prompt, cached_tokens: 0, answer_tokens: answer }
}

fn at(day: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(day * SECONDS_OF_DAY + 5)
}

/// The sum of all rows of a day.
fn total(folder: &Path, day: &str) -> TokenCounts {
    let mut sum = TokenCounts::default();
    read_usage(folder, "").unwrap().get(day).into_iter().flatten().for_each(|row| sum.add(&row.counts));
    sum
}

#[test]
fn the_files_of_all_routers_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("usage");
    let (first, second) = (TokenLedger::new(&folder), TokenLedger::new(&folder));
    for ledger in [&first, &second] {
        ledger.record(holder("k", "m"), &counts(10, 3), at(20_000));
        ledger.write().unwrap();
        ledger.record(holder("k", "m"), &counts(1, 1), at(20_000));
        ledger.record(holder("l", "m"), &counts(100, 0), at(20_001));
        ledger.write().unwrap();
    }
    assert_eq!(total(&folder, "2024-10-04"), TokenCounts { requests: 4, ..counts(22, 8) });
    assert_eq!(total(&folder, "2024-10-05"), TokenCounts { requests: 2, ..counts(200, 0) });
    assert_eq!(read_usage(&folder, "2024-10-05").unwrap().len(), 1);
    assert!(read_usage(&folder.join("none"), "").unwrap().is_empty());
}

#[test]
fn a_request_that_ends_after_its_day_was_forgotten_does_not_replace_the_day() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = TokenLedger::new(folder.path());
    let today = day_of(SystemTime::now());
    ledger.record(holder("k", "m"), &counts(10, 3), at(today));
    ledger.record(holder("k", "m"), &counts(10, 3), at(today - 1));
    ledger.write().unwrap();
    ledger.record(holder("k", "m"), &counts(1, 1), at(today - 1));
    ledger.write().unwrap();
    assert_eq!(total(folder.path(), &day_name(today - 1)), TokenCounts { requests: 2, ..counts(11, 4) });
}

#[test]
fn names_that_clients_make_up_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = TokenLedger::new(folder.path());
    for model in 0..MAX_ROWS + 500 {
        ledger.record(holder("k", &model.to_string()), &counts(1, 0), at(20_000));
    }
    ledger.write().unwrap();
    assert_eq!(total(folder.path(), "2024-10-04").requests, u64::try_from(MAX_ROWS).unwrap() + 500);
    assert_eq!(read_usage(folder.path(), "").unwrap()["2024-10-04"].len(), MAX_ROWS + 1);
}

#[test]
fn what_cannot_be_written_is_kept_until_it_can() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("usage");
    fs::write(&folder, "in the way").unwrap();
    let ledger = TokenLedger::new(&folder);
    ledger.record(holder("k", "m"), &counts(10, 3), at(20_000));
    assert!(ledger.write().is_err());
    fs::remove_file(&folder).unwrap();
    ledger.write().unwrap();
    assert_eq!(total(&folder, "2024-10-04"), counts(10, 3));
}
