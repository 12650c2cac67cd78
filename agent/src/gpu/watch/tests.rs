//! What a reading says beyond its figures.

use super::*;

fn reading(standing: Standing, remap_pending: bool, remap_failed: bool) -> (Standing, Vec<Reading>) {
    (standing, vec![Reading { remap_pending, remap_failed, ..Reading::default() }])
}

#[test]
fn a_lost_gpu_is_told_with_each_reading_and_silence_once() {
    let mut before = Before::default();
    let fine = reading(Standing::Reachable, false, false);
    let lost = reading(Standing::Lost, false, false);
    assert_eq!(before.news(Some(&fine)), []);
    assert_eq!(before.news(Some(&lost)), [What::Lost]);
    assert_eq!(before.news(Some(&lost)), [What::Lost]);
    assert_eq!(before.news(None), [What::Silent]);
    assert_eq!(before.news(None), []);
    assert_eq!(before.news(Some(&fine)), [What::Answers]);
    assert_eq!(before.news(Some(&reading(Standing::NeedsReset, false, false))), [What::NeedsReset]);
}

#[test]
fn rows_that_wait_for_a_reset_are_news_once_and_a_failed_one_always() {
    let mut before = Before::default();
    let pending = reading(Standing::Reachable, true, false);
    assert_eq!(before.news(Some(&pending)), [What::RemapPending]);
    assert_eq!(before.news(Some(&pending)), []);
    assert_eq!(before.news(Some(&reading(Standing::Reachable, false, false))), []);
    assert_eq!(before.news(Some(&pending)), [What::RemapPending]);
    let failed = reading(Standing::Reachable, true, true);
    assert_eq!(before.news(Some(&failed)), [What::RemapFailed]);
    assert_eq!(before.news(Some(&failed)), [What::RemapFailed]);
}
