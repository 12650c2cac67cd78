//! Bodies of requests: a conversation up to one of its questions, in the format of an API.

use std::io::Write;

use crate::args::Api;
use crate::session::Session;

/// Fields of a body besides the conversation.
#[derive(Debug, Clone)]
pub(crate) struct RequestOptions {
    pub(crate) api: Api,
    pub(crate) model: String,
    pub(crate) stream: bool,
    pub(crate) ignore_eos: bool,
    /// Further fields of a request, one of them by its question.
    pub(crate) response_formats: Vec<String>,
}

impl RequestOptions {
    /// The further field for a session. Its first question decides.
    fn response_format(&self, session: &Session) -> &str {
        let question = session.turns.first().map_or("", |turn| &turn.says);
        let sum = question.bytes().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        sum.checked_rem(self.response_formats.len()).map_or("", |index| &self.response_formats[index])
    }
}

/// Request of a turn, with the answers to the earlier turns.
pub(crate) fn body(form: &RequestOptions, session: &Session, turn: usize, answers: &[String]) -> Vec<u8> {
    let turns = &session.turns[..=turn];
    let text: usize = turns.iter().map(|turn| turn.says.len()).sum::<usize>() + answers.iter().map(String::len).sum::<usize>();
    let mut body = Vec::with_capacity(text + session.system.as_ref().map_or(0, |system| system.len()) + 256);
    body.extend_from_slice(b"{\"model\":");
    string(&mut body, &form.model);
    match form.api {
        Api::Chat => {
            body.extend_from_slice(b",\"messages\":[");
            if let Some(system) = &session.system {
                message(&mut body, "system", system);
            }
            for (number, turn) in turns.iter().enumerate() {
                message(&mut body, "user", &turn.says);
                if let Some(answer) = answers.get(number) {
                    message(&mut body, "assistant", answer);
                }
            }
            // Remove the comma after the last one.
            body.pop();
            body.push(b']');
        }
        Api::Completions => {
            let mut prompt = session.system.as_ref().map_or(String::new(), |system| format!("{system}\n\n"));
            for (number, turn) in turns.iter().enumerate() {
                prompt.push_str(&turn.says);
                if let Some(answer) = answers.get(number) {
                    prompt.push_str("\n\n");
                    prompt.push_str(answer);
                    prompt.push_str("\n\n");
                }
            }
            body.extend_from_slice(b",\"prompt\":");
            string(&mut body, &prompt);
        }
    }
    let all = if form.ignore_eos { ",\"ignore_eos\":true" } else { "" };
    let stream = if form.stream { ",\"stream\":true,\"stream_options\":{\"include_usage\":true}" } else { "" };
    let _ = write!(body, ",\"max_tokens\":{}{stream}{all}{}}}", turns[turn].most_tokens, form.response_format(session));
    body
}

fn message(body: &mut Vec<u8>, role: &str, content: &str) {
    let _ = write!(body, "{{\"role\":\"{role}\",\"content\":");
    string(body, content);
    body.extend_from_slice(b"},");
}

fn string(body: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(body, text).expect("a text is JSON, and writing to memory does not fail");
}

#[cfg(test)]
mod tests;
