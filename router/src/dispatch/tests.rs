use super::retry_budget::RetryBudget;

#[test]
fn retries_are_a_fifth_of_the_requests_once_the_reserve_is_spent() {
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
