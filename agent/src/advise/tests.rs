//! Publishing: new and ended findings at once, new figures now and then.

use super::*;

fn finding(evidence: &str) -> Finding {
    Finding { kind: FindingKind::FrontEnd, evidence: evidence.into(), advice: "--front-end rust".into() }
}

#[tokio::test(start_paused = true)]
async fn new_findings_are_logged_at_once_and_their_figures_occasionally() {
    let (sender, mut findings) = watch::channel(Vec::new());
    let mut renewed = Instant::now();
    publish(&sender, vec![finding("0.95")], &mut renewed);
    assert!(findings.has_changed().unwrap());
    assert_eq!(*findings.borrow_and_update(), [finding("0.95")]);
    for _ in 0..9 {
        tokio::time::sleep(OBSERVE_INTERVAL).await;
        publish(&sender, vec![finding("0.96")], &mut renewed);
        assert!(!findings.has_changed().unwrap());
    }
    tokio::time::sleep(OBSERVE_INTERVAL).await;
    publish(&sender, vec![finding("0.96")], &mut renewed);
    assert_eq!(*findings.borrow_and_update(), [finding("0.96")]);
    publish(&sender, Vec::new(), &mut renewed);
    assert!(findings.has_changed().unwrap(), "what is gone is told at once");
    assert!(findings.borrow_and_update().is_empty());
}
