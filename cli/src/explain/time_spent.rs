//! Where the time of a stream went, in one sentence: the router's queue, the first token, the others.

use hostler_proto::fleet::v1::{Decision, Scored, Terms};

use super::arithmetic::milliseconds;
use super::first_token;

/// A first token is late after so many times the expected time, which counts as 50 ms at least.
const LATE_FACTOR: f64 = 2.0;
const LATE_FROM: f64 = 0.05;

/// Where the time of a stream went, in one sentence; `None` before its first token.
pub(super) fn time_spent(decision: &Decision, chosen: &Scored) -> Option<String> {
    let first = decision.first_token?;
    let Terms { queue, prefill, steps, memory, .. } = chosen.terms.unwrap_or_default();
    let expected = first_token(chosen);
    // The engine does not say what its first token waited for: the prediction's shares do.
    let share = |predicted: f64| first * predicted / expected;
    let parts = [
        (decision.queue_seconds, "it waited in the router, because no replica had room"),
        (share(queue), "prompts of others were computed before it"),
        (share(prefill), "its own prompt was computed"),
        (share(steps), "its steps were shared with answers that run there"),
        (share(memory), "it waited for room in the engine's KV cache"),
    ];
    let longest = parts.into_iter().max_by(|(one, _), (other, _)| one.total_cmp(other));
    let longest = longest.filter(|(seconds, _)| seconds.is_finite() && *seconds > 0.0).map(|(_, words)| format!("; most of it: {words}"));
    let late = if first > LATE_FACTOR * expected.max(LATE_FROM) {
        ", later than was expected: `hostler advise` says what costs that engine speed"
    } else {
        ""
    };
    let between = decision.between_tokens.map(|seconds| format!(", then {:.1} ms a token", milliseconds(seconds))).unwrap_or_default();
    Some(format!(
        "time: {:.3} s in the router's queue, {first:.3} s until the first token ({expected:.3} expected){between}{}{late}",
        decision.queue_seconds,
        longest.unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(queued: f64, first: f64, terms: Terms) -> String {
        let chosen = Scored { terms: Some(terms), ..Scored::default() };
        let decision = Decision { queue_seconds: queued, first_token: Some(first), between_tokens: Some(0.0052), ..Decision::default() };
        time_spent(&decision, &chosen).unwrap()
    }

    #[test]
    fn the_longest_wait_is_named() {
        let terms = Terms { queue: 0.02, prefill: 0.07, steps: 0.01, ..Terms::default() };
        assert_eq!(
            words(0.0, 0.11, terms),
            "time: 0.000 s in the router's queue, 0.110 s until the first token (0.100 expected), then 5.2 ms a token; \
             most of it: its own prompt was computed"
        );
        assert!(words(6.0, 0.11, terms).ends_with("most of it: it waited in the router, because no replica had room"));
        assert!(words(0.0, 0.1, Terms { queue: 0.9, ..terms }).contains("prompts of others were computed before it"));
        assert!(words(0.0, 0.1, Terms { memory: 3.0, ..terms }).contains("room in the engine's KV cache"));
    }

    #[test]
    fn a_first_token_much_later_than_expected_is_said_to_be() {
        let terms = Terms { prefill: 0.1, ..Terms::default() };
        assert!(words(0.0, 0.9, terms).contains("later than was expected: `hostler advise`"));
        assert!(!words(0.0, 0.15, terms).contains("later than"));
        assert!(!words(0.0, 0.09, Terms { prefill: 0.001, ..Terms::default() }).contains("later than"), "nobody feels that");
        assert!(words(0.0, 0.9, Terms::default()).contains("0.900 s until the first token"), "no term is known");
    }

    #[test]
    fn an_answer_without_a_first_token_has_no_times() {
        assert_eq!(time_spent(&Decision::default(), &Scored::default()), None);
    }
}
