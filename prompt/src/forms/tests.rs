//! Tests of the forms that requests have.

use serde_json::json;

use super::*;

const CHAT: &str = "/v1/chat/completions";

fn forms(path: &str, body: &Value) -> Vec<PromptForm> {
    PromptRequest::parse(path, body.to_string().as_bytes()).unwrap().forms().iter().collect()
}

/// Forms of a chat with these messages and these further fields.
fn chat(messages: &Value, others: &Value) -> Vec<PromptForm> {
    let mut body = others.clone();
    body["messages"] = messages.clone();
    let forms = forms(CHAT, &body);
    assert_eq!(forms, self::forms("/tokenize", &body), "the samples have the forms of the requests that they stand for: {body}");
    forms
}

#[test]
fn a_completion_is_text_whatever_its_prompt_contains() {
    for prompt in [json!("a"), json!(["a", "b"]), json!([1, 2]), json!([[1], [2]])] {
        assert_eq!(
            forms("/v1/completions", &json!({ "prompt": prompt, "tools": [], "continue_final_message": true })),
            [PromptForm::Texts]
        );
    }
    assert_eq!(forms("/tokenize", &json!({ "prompt": "a" })), [PromptForm::Texts]);
}

#[test]
fn a_chat_has_every_form_that_its_fields_imply() {
    use PromptForm::{Chats, Closed, Continued, Parts, Tools};
    let user = json!({ "role": "user", "content": "a" });
    let part = json!({ "role": "user", "content": [{ "type": "text", "text": "a" }] });
    let plain = json!([user]);
    let cases: [(&Value, Value, &[PromptForm]); 9] = [
        (&plain, json!({}), &[Chats]),
        (&plain, json!({ "add_generation_prompt": true, "continue_final_message": false, "tools": null }), &[Chats]),
        (&plain, json!({ "chat_template_kwargs": { "add_generation_prompt": false, "continue_final_message": true } }), &[Chats]),
        (&plain, json!({ "add_generation_prompt": false }), &[Chats, Closed]),
        (&plain, json!({ "add_generation_prompt": false, "continue_final_message": true }), &[Chats, Closed, Continued]),
        (&plain, json!({ "tools": [] }), &[Chats, Tools]),
        (&plain, json!({ "chat_template_kwargs": { "tools": [1] } }), &[Chats, Tools]),
        (&json!([user, part]), json!({}), &[Chats, Parts]),
        (
            &json!([user, part]),
            json!({ "tools": [1], "add_generation_prompt": false, "continue_final_message": true }),
            &[Chats, Closed, Continued, Parts, Tools],
        ),
    ];
    for (messages, others, expected) in cases {
        assert_eq!(chat(messages, &others), expected, "{messages} {others}");
    }
}

#[test]
fn tool_messages_make_a_tool_chat_without_offered_tools() {
    for message in [
        json!({ "role": "assistant", "content": null, "tool_calls": [] }),
        json!({ "role": "tool", "content": "a" }),
        json!({ "role": "user", "content": "a", "tool_call_id": "b" }),
        json!({ "role": "developer", "content": "a", "tools": [1] }),
    ] {
        assert_eq!(chat(&json!([message]), &json!({})), [PromptForm::Chats, PromptForm::Tools], "{message}");
    }
    let nothing = json!([{ "role": "assistant", "content": null, "tool_calls": null }, "no message", { "content": {} }]);
    assert_eq!(chat(&nothing, &json!({})), [PromptForm::Chats]);
}

#[test]
fn a_set_of_forms_knows_its_members() {
    let some: PromptForms = [PromptForm::Tools, PromptForm::Chats].into_iter().collect();
    assert_eq!((some.has(PromptForm::Chats), some.has(PromptForm::Texts), some.iter().count()), (true, false, 2));
    assert_eq!(PromptForms::ALL.iter().collect::<Vec<_>>(), PromptForm::ALL);
    assert_eq!(some.without(PromptForms::default().with(PromptForm::Chats)), PromptForms::default().with(PromptForm::Tools));
    assert_eq!(format!("{some:?}"), "{Chats, Tools}");
}

#[test]
fn operators_see_which_forms_are_placed_by_text() {
    let remark = |open: &[PromptForm]| PromptForms::ALL.without(open.iter().copied().collect()).unproved_remark();
    assert_eq!(remark(&[]), "");
    assert_eq!(remark(&[PromptForm::Continued]), "continued messages are placed by text");
    assert_eq!(remark(&[PromptForm::Tools, PromptForm::Parts]), "messages in parts, tools are placed by text");
    assert_eq!(remark(&[PromptForm::Tools, PromptForm::Chats, PromptForm::Continued]), "chats are placed by text", "of whatever kind");
    assert_eq!(PromptForms::default().unproved_remark(), "texts, chats are placed by text");
}
