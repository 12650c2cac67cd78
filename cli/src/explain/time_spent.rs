//! Where the time of an answer went, in one sentence: the router's queue, the first token, the
//! others, and the longest gap.

use hostler_proto::fleet::v1::{Decision, Scored, Terms};

use super::arithmetic::{milliseconds, step_seconds};
use super::first_token;

/// A first token is late after so many times the expected time, which counts as 50 ms at least.
const LATE_FACTOR: f64 = 2.0;
const LATE_FROM: f64 = 0.05;

/// A KV cache counts as full from this share on. vLLM begins to preempt when it finds no block.
const FULL_FROM: f64 = 0.95;

/// A gap in a stream is worth words from this many seconds on, and after so many times the usual
/// time between two tokens.
const GAP_FROM: f64 = 0.5;
const GAP_FACTOR: f64 = 5.0;

/// Where the time of an answer went, in one sentence; `None` before its first token.
pub(super) fn time_spent(decision: &Decision, chosen: &Scored) -> Option<String> {
    // A plain answer shows no first token, so the expected one stands for it.
    let first = decision.first_token.or_else(|| Some(first_token(chosen).min(decision.total?)))?;
    let longest = parts(decision, chosen, first).into_iter().max_by(|(one, _), (other, _)| one.total_cmp(other));
    let longest = longest.filter(|(seconds, _)| *seconds > 0.0).map(|(_, words)| format!("; most of it: {words}"));
    let most = loss_words(&decision.end).map(|words| format!("; it ended there, because {words}")).or(longest);
    let course = course(decision, chosen)?;
    let queued = decision.queue_seconds;
    Some(format!("time: {queued:.3} s in the router's queue, {course}{}{}", most.unwrap_or_default(), late(decision, chosen)))
}

/// Why an engine gave no more of an answer; `None` if that is not what happened.
fn loss_words(end: &str) -> Option<&'static str> {
    Some(match end {
        "agent_lost" => "the connection to its agent was lost",
        "difference" => "the engine's replay of the answer differed from what the client has got",
        "draining" => "the replica was emptied",
        "engine_error" => "the engine reported an error",
        "engine_lost" => "the engine died, or hung and was killed",
        "engine_stopped" => "the engine was stopped",
        "incomplete" => "the engine ended the answer before it was complete",
        "protocol" => "the agent broke the protocol",
        "router_left" => "the router had to leave",
        "silent" => "the agent was silent",
        _ => return None,
    })
}

/// The answer from its dispatch to its end, as far as it has come.
fn course(decision: &Decision, chosen: &Scored) -> Option<String> {
    let tokens = decision.answer_tokens.map(|tokens| format!(" of {tokens} tokens")).unwrap_or_default();
    let Some(first) = decision.first_token else {
        return Some(format!("{:.3} s until the whole answer{tokens}, which was no stream", decision.total?));
    };
    let between = decision.between_tokens.map(|seconds| format!(", then {:.1} ms a token", milliseconds(seconds))).unwrap_or_default();
    let total = decision.total.map(|total| format!(", {total:.3} s until the end{tokens}")).unwrap_or_default();
    let gap = gap(decision).unwrap_or_default();
    Some(format!("{first:.3} s until the first token ({:.3} expected){between}{total}{gap}", first_token(chosen)))
}

fn gap(decision: &Decision) -> Option<String> {
    let (gap, began) = decision.longest_gap.zip(decision.longest_gap_at)?;
    let usual = GAP_FACTOR * decision.between_tokens.unwrap_or(0.0);
    (gap >= GAP_FROM.max(usual)).then(|| format!("; its longest gap was {gap:.1} s, {began:.1} s after it was sent"))
}

/// What the seconds of an answer may have been spent on, whose first token came after `first`.
///
/// The engine does not say what its first token waited for: the prediction's shares do. What came
/// after it is compared with the engine's own pace, at which a request runs alone.
fn parts(decision: &Decision, chosen: &Scored, first: f64) -> [(f64, &'static str); 7] {
    let Terms { queue, prefill, load, steps, memory, .. } = chosen.terms.unwrap_or_default();
    let expected = first_token(chosen);
    let share = |term: f64| if expected > 0.0 { first * term / expected } else { 0.0 };
    let (own_step, shared_step) = (chosen.rates.unwrap_or_default().step, step_seconds(chosen));
    let own_share = if shared_step > 0.0 { (own_step / shared_step).clamp(0.0, 1.0) } else { 1.0 };
    let written = decision.total.map_or(0.0, |total| (total - first).max(0.0));
    #[allow(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
    let at_own_pace = written.min(decision.answer_tokens.unwrap_or(0).saturating_sub(1) as f64 * own_step);
    let is_alone = chosen.in_flight == 0 && chosen.pending == 0;
    let own = if is_alone { "the engine's own pace: nothing else ran there when it came" } else { "the engine's own pace" };
    let shared = if is_alone {
        "its tokens came slower than that engine's own pace, though nothing else ran there when it came"
    } else {
        "its steps were shared with answers that run there"
    };
    let (own_steps, shared_steps) = (share(steps) * own_share, share(steps) * (1.0 - own_share));
    [
        (decision.queue_seconds, "it waited in the router, because no replica was ready or had room"),
        (share(queue), "prompts of others were computed before it"),
        (share(prefill), "its own prompt was computed"),
        (share(load), "the part of its prompt in the host's memory, or in files, was loaded"),
        (share(memory), "it waited for room in the engine's KV cache"),
        (own_steps + at_own_pace, own),
        (shared_steps + written - at_own_pace, shared),
    ]
}

/// What may have made a late first token late.
fn late(decision: &Decision, chosen: &Scored) -> String {
    if decision.first_token.is_none_or(|first| first <= LATE_FACTOR * first_token(chosen).max(LATE_FROM)) {
        return String::new();
    }
    let cause = if chosen.kv_use >= FULL_FROM {
        format!("that engine's KV cache was {:.0}% full when it came, so requests wait there for room", chosen.kv_use * 100.0)
    } else {
        "`hostler advise` says what costs that engine speed, after half a minute of work".to_owned()
    };
    format!(", later than was expected: {cause}")
}

#[cfg(test)]
mod tests {
    use hostler_proto::fleet::v1::Rates;

    use super::*;

    /// An engine with steps of 5 ms, to which each answer in flight adds 1 ms.
    fn chosen(terms: Terms, in_flight: u32) -> Scored {
        let rates = Rates { step: 0.005, decode: 0.001, ..Rates::default() };
        Scored { terms: Some(terms), rates: Some(rates), in_flight, ..Scored::default() }
    }

    fn words(queued: f64, first: f64, terms: Terms) -> String {
        let decision = Decision { queue_seconds: queued, first_token: Some(first), between_tokens: Some(0.0052), ..Decision::default() };
        time_spent(&decision, &chosen(terms, 0)).unwrap()
    }

    /// A stream of 300 tokens that came after 0.1 s, one each `between` seconds.
    fn streamed(between: f64, in_flight: u32) -> String {
        let terms = Terms { prefill: 0.09, steps: 0.01, ..Terms::default() };
        let (total, answer_tokens) = (Some(0.1 + 299.0 * between), Some(300));
        let decision = Decision { first_token: Some(0.1), between_tokens: Some(between), total, answer_tokens, ..Decision::default() };
        time_spent(&decision, &chosen(terms, in_flight)).unwrap()
    }

    #[test]
    fn the_longest_wait_is_named() {
        let terms = Terms { queue: 0.02, prefill: 0.07, steps: 0.01, ..Terms::default() };
        assert_eq!(
            words(0.0, 0.11, terms),
            "time: 0.000 s in the router's queue, 0.110 s until the first token (0.100 expected), then 5.2 ms a token; \
             most of it: its own prompt was computed"
        );
        assert!(words(6.0, 0.11, terms).ends_with("most of it: it waited in the router, because no replica was ready or had room"));
        assert!(words(0.0, 0.1, Terms { queue: 0.9, ..terms }).contains("prompts of others were computed before it"));
        assert!(words(0.0, 0.1, Terms { memory: 3.0, ..terms }).contains("room in the engine's KV cache"));
    }

    #[test]
    fn an_answer_that_ran_alone_shared_its_steps_with_nobody() {
        let alone = streamed(0.0051, 0);
        assert!(alone.contains("1.625 s until the end of 300 tokens; most of it: the engine's own pace: nothing else ran"), "{alone}");
        let short = words(0.0, 0.02, Terms { steps: 0.018, prefill: 0.002, ..Terms::default() });
        assert!(short.ends_with("the engine's own pace: nothing else ran there when it came"), "{short}");
        assert!(streamed(0.02, 0).contains("slower than that engine's own pace, though nothing else ran there when it came"));
    }

    #[test]
    fn a_busy_engine_is_blamed_only_for_what_others_cost() {
        assert!(streamed(0.02, 12).ends_with("most of it: its steps were shared with answers that run there"));
        let light = streamed(0.006, 1);
        assert!(light.ends_with("most of it: the engine's own pace"), "{light}");
    }

    #[test]
    fn a_first_token_much_later_than_expected_is_said_to_be() {
        let terms = Terms { prefill: 0.1, ..Terms::default() };
        assert!(words(0.0, 0.9, terms).contains("later than was expected: `hostler advise`"));
        let decision = Decision { first_token: Some(0.9), ..Decision::default() };
        let full = time_spent(&decision, &Scored { kv_use: 0.99, ..chosen(terms, 9) }).unwrap();
        assert!(
            full.ends_with("later than was expected: that engine's KV cache was 99% full when it came, so requests wait there for room")
        );
        assert!(!words(0.0, 0.15, terms).contains("later than"));
        assert!(!words(0.0, 0.09, Terms { prefill: 0.001, ..Terms::default() }).contains("later than"), "nobody feels that");
        assert!(words(0.0, 0.9, Terms::default()).contains("0.900 s until the first token"), "no term is known");
    }

    #[test]
    fn a_stream_that_broke_off_is_explained_by_the_loss_and_not_by_its_pace() {
        let end = "engine_lost".to_owned();
        let decision = Decision { first_token: Some(0.1), total: Some(3.0), end, ..Decision::default() };
        let told = time_spent(&decision, &chosen(Terms { steps: 0.1, ..Terms::default() }, 4)).unwrap();
        assert!(told.contains("3.000 s until the end; it ended there, because the engine died, or hung and was killed"), "{told}");
    }

    #[test]
    fn a_plain_answer_has_its_whole_time() {
        let decision = Decision { total: Some(2.0), answer_tokens: Some(400), ..Decision::default() };
        let told = time_spent(&decision, &chosen(Terms { steps: 0.005, prefill: 0.02, ..Terms::default() }, 0)).unwrap();
        assert!(
            told.contains("queue, 2.000 s until the whole answer of 400 tokens, which was no stream; most of it: the engine's"),
            "{told}"
        );
        assert_eq!(time_spent(&Decision::default(), &Scored::default()), None, "it runs still");
    }

    #[test]
    fn a_long_gap_in_a_stream_is_told_with_its_moment() {
        let told = |gap| {
            let (longest_gap, longest_gap_at) = (Some(gap), Some(7.25));
            let between_tokens = Some(0.02);
            time_spent(
                &Decision { first_token: Some(0.1), between_tokens, longest_gap, longest_gap_at, ..Decision::default() },
                &chosen(Terms::default(), 0),
            )
            .unwrap()
        };
        assert!(told(3.0).contains("; its longest gap was 3.0 s, 7.2 s after it was sent"), "{}", told(3.0));
        assert!(!told(0.1).contains("gap"));
    }
}
