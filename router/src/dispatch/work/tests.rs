use super::*;

#[test]
fn nothing_beyond_what_a_request_can_take_is_believed() {
    let told = Usage { prompt: u64::MAX, completion: 1_000_000_000_000_000_000, cached: Some(u64::MAX) };
    let most = Work { prompts: 1, answers: 4, turns: 1 }.most(1000);
    assert_eq!(most.bound(told), Some(Usage { prompt: 1000, completion: 4000, cached: Some(1000) }));
    let usual = Usage { prompt: 900, completion: 400, cached: None };
    assert_eq!(most.bound(usual), Some(usual));
    assert_eq!(Work { prompts: 3, answers: 0, turns: 1 }.most(1000).bound(told).map(|usage| usage.completion), Some(0));
}

#[test]
fn an_answer_that_is_made_of_what_the_client_sent_tells_nothing() {
    assert_eq!(Work::default().most(1000).bound(Usage { prompt: 5, completion: 5, cached: None }), None);
}
