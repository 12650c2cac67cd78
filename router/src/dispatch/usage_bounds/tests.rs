use super::*;

#[test]
fn usage_beyond_a_requests_bounds_is_not_believed() {
    let reported = TokenUsage { prompt_tokens: u64::MAX, completion_tokens: 1_000_000_000_000_000_000, cached_tokens: Some(u64::MAX) };
    let most = Work { prompts: 1, answers: 4, turns: 1 }.usage_bounds(1000);
    assert_eq!(most.clamp(reported), Some(TokenUsage { prompt_tokens: 1000, completion_tokens: 4000, cached_tokens: Some(1000) }));
    let usual = TokenUsage { prompt_tokens: 900, completion_tokens: 400, cached_tokens: None };
    assert_eq!(most.clamp(usual), Some(usual));
    assert_eq!(Work { prompts: 3, answers: 0, turns: 1 }.usage_bounds(1000).clamp(reported).map(|usage| usage.completion_tokens), Some(0));
}

#[test]
fn usage_is_not_believed_where_answers_echo_the_client() {
    assert_eq!(Work::default().usage_bounds(1000).clamp(TokenUsage { prompt_tokens: 5, completion_tokens: 5, cached_tokens: None }), None);
}
