use super::*;

/// The body of a recorded answer.
fn recorded(raw: &[u8]) -> CompletionChunk {
    serde_json::from_slice(&raw[memchr::memmem::find(raw, b"\r\n\r\n").unwrap() + 4..]).unwrap()
}

fn only(mut answered: CompletionChunk) -> wire::Choice {
    choice(answered.choices.remove(0))
}

#[test]
fn a_recorded_chat_is_parsed() {
    let mut answered = recorded(include_bytes!("../../../../tests/fixtures/vllm/json_chat.raw"));
    assert_eq!(prompt_token_ids(&mut answered), [1, 1557, 201, 74, 75, 2, 201, 1, 3505, 478, 785, 201]);
    let reported = usage(answered.usage.as_ref().unwrap());
    assert_eq!((reported.prompt_tokens, reported.completion_tokens, reported.cached_tokens), (12, 4, None));
    let choice = only(answered);
    assert_eq!((choice.text.as_str(), &choice.token_ids[..]), ("(*yesversion", &[1774, 2685, 828, 225][..]));
    assert_eq!(choice.finish.unwrap().reason(), wire::FinishReason::Length);
}

#[test]
fn a_recorded_completion_is_parsed() {
    let answered = recorded(include_bytes!("../../../../tests/fixtures/vllm/json_completions.raw"));
    let choice = only(answered);
    assert!(!choice.text.is_empty() && choice.finish.is_some());
}

#[test]
fn log_probabilities_of_texts_and_chats_have_one_form() {
    let text = br#"{"choices":[{"index":0,"text":"ab","logprobs":{"text_offset":[0,1],"tokens":["a","b"],"token_logprobs":[null,-0.5],
        "top_logprobs":[null,{"b":-0.5,"c":-1.5}]}}]}"#;
    let text = only(serde_json::from_slice(text).unwrap()).logprobs;
    assert_eq!((text[0].logprob, text[0].alternatives.len()), (0.0, 0));
    let alternatives: Vec<_> = text[1].alternatives.iter().map(|other| (other.token.as_str(), other.logprob)).collect();
    assert_eq!((text[1].token.as_str(), text[1].logprob, alternatives), ("b", -0.5, vec![("b", -0.5), ("c", -1.5)]));
    let chat = br#"{"choices":[{"index":0,"message":{"content":"b"},"logprobs":{"content":[
        {"token":"b","logprob":-0.5,"bytes":[98],"top_logprobs":[{"token":"c","logprob":-1.5,"bytes":null}]}]}}]}"#;
    let chat = only(serde_json::from_slice(chat).unwrap()).logprobs;
    assert_eq!((chat[0].token.as_str(), &chat[0].bytes[..], chat[0].alternatives[0].logprob), ("b", &b"b"[..], -1.5));
}

#[test]
fn a_tool_call_and_a_stop_text_are_parsed() {
    let answer = br#"{"choices":[{"index":2,"message":{"content":null,"reasoning":"hm","tool_calls":[{"id":"c","type":"function",
        "function":{"name":"f","arguments":"{}"}}]},"finish_reason":"tool_calls","stop_reason":"END"}]}"#;
    let choice = only(serde_json::from_slice(answer).unwrap());
    assert_eq!((choice.index, choice.text.as_str(), choice.reasoning.as_str()), (2, "", "hm"));
    assert_eq!((choice.tool_calls[0].id.as_str(), choice.tool_calls[0].name.as_str()), ("c", "f"));
    let finish = choice.finish.unwrap();
    assert_eq!((finish.reason(), finish.stopped_by), (wire::FinishReason::ToolCalls, Some(StoppedBy::Text("END".into()))));
}
