//! When a prompt counts as computed. Whole requests are relayed by the system's tests.

use std::pin::pin;

use tokio::time::timeout;

use super::*;
use crate::traffic::Traffic;

#[tokio::test(start_paused = true)]
async fn a_prompt_without_a_byte_of_its_answer_counts_as_computed_when_its_time_has_passed() {
    let traffic = Traffic::new();
    let in_flight = traffic.enter_with(RouterKey(1), Prompt { tokens: 9, uncached: 5 });
    let pending = || traffic.changes().borrow().sum().pending_tokens;
    let mut settled = pin!(settled(Some(&in_flight), Duration::from_millis(50)));
    assert!(timeout(Duration::from_millis(49), settled.as_mut()).await.is_err());
    assert_eq!(pending(), 5);
    assert!(timeout(Duration::from_millis(2), settled.as_mut()).await.is_err(), "it never ends the request");
    assert_eq!((pending(), traffic.total()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn without_such_a_time_only_the_answer_tells() {
    let traffic = Traffic::new();
    let in_flight = traffic.enter_with(RouterKey(1), Prompt { tokens: 9, uncached: 5 });
    assert!(timeout(Duration::from_secs(3600), settled(Some(&in_flight), Duration::ZERO)).await.is_err());
    assert_eq!(traffic.changes().borrow().sum().pending_tokens, 5);
}
