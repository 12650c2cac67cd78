use prometheus_client::metrics::counter::Counter;

use super::retry_budget::{RetryBudget, RetryBudgets};
use super::retry_policy::RetryPayment;
use crate::metrics::RouterMetrics;

#[test]
fn retries_are_limited_to_a_fifth_of_the_requests() {
    let budget = RetryBudget::new(256);
    let reserve = std::iter::repeat_with(|| budget.withdraw()).take_while(|allowed| *allowed).count();
    assert_eq!(reserve, 256);
    (0..1000).for_each(|_| budget.deposit());
    let earned = std::iter::repeat_with(|| budget.withdraw()).take_while(|allowed| *allowed).count();
    assert_eq!(earned, 200);
    (0..100_000).for_each(|_| budget.deposit());
    let kept = std::iter::repeat_with(|| budget.withdraw()).take_while(|allowed| *allowed).count();
    assert_eq!(kept, 256, "a quiet hour saves up no more than the reserve");
}

#[test]
fn a_denied_retry_is_counted_and_spends_no_other_budget() {
    let (budgets, metrics) = (RetryBudgets::default(), RouterMetrics::default());
    let denied = || metrics.retries_denied.each_ref().map(Counter::get);
    (0..256).for_each(|_| assert!(budgets.pay(RetryPayment::RefusedBudget, &metrics)));
    assert!(budgets.pay(RetryPayment::Free, &metrics));
    assert_eq!(denied(), [0, 0]);
    assert!(!budgets.pay(RetryPayment::RefusedBudget, &metrics) && budgets.pay(RetryPayment::LostBudget, &metrics));
    assert_eq!(denied(), [0, 1]);
}
