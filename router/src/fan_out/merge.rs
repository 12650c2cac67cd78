//! Merges the answers of the parts of one request.

use bytes::Bytes;
use serde_json::{Map, Value};

/// Whose answer a part's is among all of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartPosition {
    /// Index of the part's choice.
    pub(super) index: usize,
    /// Whether the part is the first of its prompt, whose tokens count once.
    pub(super) counts_prompt: bool,
}

/// State of a merge: fields of the first part that came, and the usage of all.
#[derive(Debug, Default)]
pub(super) struct MergedAnswer {
    /// Fields by which an answer is known, from the first part that came.
    identity: Option<[Value; 2]>,
    usage: Option<Map<String, Value>>,
    /// The last event's fields beside its choices and usage.
    usage_event: Option<Map<String, Value>>,
}

/// Fields that all events of an answer have in common.
const IDENTITY: [&str; 2] = ["id", "created"];

impl MergedAnswer {
    /// Rewrites the data of a part's event for the merged stream. `None` if nothing is to be sent
    /// for it now.
    ///
    /// # Errors
    /// If the data is no event of an answer.
    pub(super) fn merge_event(&mut self, part: PartPosition, data: &[u8]) -> Result<Option<MergedEvent>, String> {
        let unreadable = |error: serde_json::Error| format!("an event of the engine cannot be read: {error}");
        let mut event: Map<String, Value> = serde_json::from_slice(data).map_err(unreadable)?;
        if event.contains_key("error") {
            return Ok(Some(MergedEvent { data: Bytes::copy_from_slice(data), is_error: true }));
        }
        self.set_identity(&mut event);
        let choices = event.get_mut("choices").and_then(Value::as_array_mut).ok_or("an event of the engine has no choices")?;
        if choices.is_empty() {
            if let Some(usage) = event.get("usage").and_then(Value::as_object) {
                self.add_usage(part, &usage.clone());
                self.usage_event = Some(event);
            }
            return Ok(None);
        }
        set_index(choices, part)?;
        Ok(Some(MergedEvent { data: Value::from(event).to_string().into(), is_error: false }))
    }

    /// The event with the usage of all parts, if theirs had some.
    pub(super) fn usage_event(&mut self) -> Option<Bytes> {
        let mut event = self.usage_event.take()?;
        event.insert("usage".to_owned(), self.total_usage()?);
        Some(Value::from(event).to_string().into())
    }

    /// Merges the whole answers of all parts.
    ///
    /// # Errors
    /// If one of them is no answer.
    pub(super) fn merge_answers(answers: &[(PartPosition, Bytes)]) -> Result<Bytes, String> {
        let mut merged = Self::default();
        let (mut first, mut choices) = (None, Vec::new());
        for (part, answer) in answers {
            let mut answer: Map<String, Value> =
                serde_json::from_slice(answer).map_err(|error| format!("an answer of the engine cannot be read: {error}"))?;
            let mut own = answer.get_mut("choices").map(Value::take);
            let own = own.as_mut().and_then(Value::as_array_mut).ok_or("an answer of the engine has no choices")?;
            set_index(own, *part)?;
            choices.append(own);
            if let Some(usage) = answer.get("usage").and_then(Value::as_object) {
                merged.add_usage(*part, usage);
            }
            first.get_or_insert(answer);
        }
        let mut answer = first.ok_or("the engine gave no answer")?;
        answer.insert("choices".to_owned(), choices.into());
        if let Some(usage) = merged.total_usage() {
            answer.insert("usage".to_owned(), usage);
        }
        Ok(Value::from(answer).to_string().into())
    }

    fn set_identity(&mut self, event: &mut Map<String, Value>) {
        let own = || IDENTITY.map(|name| event.get(name).cloned().unwrap_or_default());
        let identity = self.identity.get_or_insert_with(own);
        for (name, value) in IDENTITY.iter().zip(identity) {
            if let Some(field) = event.get_mut(*name) {
                *field = value.clone();
            }
        }
    }

    fn add_usage(&mut self, part: PartPosition, usage: &Map<String, Value>) {
        let total = self.usage.get_or_insert_default();
        for (name, count) in usage {
            let sum = total.entry(name).or_insert(Value::Null);
            if part.counts_prompt || !name.starts_with("prompt") {
                add(sum, count);
            }
        }
    }

    fn total_usage(&mut self) -> Option<Value> {
        let mut usage = self.usage.take()?;
        let count = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or_default();
        let total = count("prompt_tokens").saturating_add(count("completion_tokens"));
        usage.insert("total_tokens".to_owned(), total.into());
        Some(usage.into())
    }
}

/// One event of the merged stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MergedEvent {
    pub(super) data: Bytes,
    /// Nothing follows an error.
    pub(super) is_error: bool,
}

/// Gives a part's only choice its index.
fn set_index(choices: &mut [Value], part: PartPosition) -> Result<(), String> {
    let [Value::Object(choice)] = choices else { return Err("an answer of the engine has another number of choices than one".to_owned()) };
    choice.insert("index".to_owned(), part.index.into());
    Ok(())
}

/// Adds counts, and those of nested objects.
fn add(total: &mut Value, more: &Value) {
    match (&mut *total, more) {
        (Value::Object(total), Value::Object(more)) => {
            for (name, count) in more {
                add(total.entry(name).or_insert(Value::Null), count);
            }
        }
        (Value::Number(count), Value::Number(more)) => {
            *total = count.as_u64().unwrap_or_default().saturating_add(more.as_u64().unwrap_or_default()).into();
        }
        (Value::Null, more) => *total = more.clone(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn part(index: usize, counts_prompt: bool) -> PartPosition {
        PartPosition { index, counts_prompt }
    }

    fn usage(prompt: u32, completion: u32, cached: u32) -> Value {
        json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached}, "completion_tokens_details": null})
    }

    #[test]
    fn whole_answers_become_choices_of_one() {
        let answer = |id: &str, text: &str, usage: Value| {
            let answer = json!({"id": id, "object": "text_completion", "created": 7, "model": "m",
                "choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage});
            Bytes::from(answer.to_string())
        };
        let answers = [
            (part(0, true), answer("a", "x", usage(5, 2, 0))),
            (part(1, false), answer("b", "y", usage(5, 3, 4))),
            (part(2, true), answer("c", "z", usage(6, 4, 2))),
        ];
        let merged: Value = serde_json::from_slice(&MergedAnswer::merge_answers(&answers).unwrap()).unwrap();
        let choice = |index: usize, text: &str| json!({"index": index, "text": text, "finish_reason": "length"});
        assert_eq!(
            merged,
            json!({"id": "a", "object": "text_completion", "created": 7, "model": "m",
                "choices": [choice(0, "x"), choice(1, "y"), choice(2, "z")], "usage": usage(11, 9, 2)})
        );
        assert!(MergedAnswer::merge_answers(&[(part(0, true), Bytes::from_static(b"{\"choices\":[]}"))]).is_err());
        assert!(MergedAnswer::merge_answers(&[(part(0, true), Bytes::from_static(b"oh"))]).is_err());
    }

    #[test]
    fn events_get_the_id_of_the_first_and_their_index() {
        let mut merged = MergedAnswer::default();
        let event =
            |id: &str, choices: Value, usage: Value| json!({"id": id, "created": 7, "choices": choices, "usage": usage}).to_string();
        let mut data = |position, event: String| {
            merged.merge_event(position, event.as_bytes()).unwrap().map(|event| serde_json::from_slice::<Value>(&event.data).unwrap())
        };
        let choice = |index: usize| json!([{"index": index, "text": "x"}]);
        let second = data(part(1, false), event("b", choice(0), Value::Null)).unwrap();
        assert_eq!((&second["id"], &second["choices"]), (&json!("b"), &choice(1)));
        let first = data(part(0, true), event("a", choice(0), Value::Null)).unwrap();
        assert_eq!((&first["id"], &first["choices"]), (&json!("b"), &choice(0)));
        for (position, usage) in [(part(0, true), usage(5, 2, 1)), (part(1, false), usage(5, 3, 5))] {
            assert_eq!(data(position, event("a", json!([]), usage)), None);
        }
        let last: Value = serde_json::from_slice(&merged.usage_event().unwrap()).unwrap();
        assert_eq!((&last["usage"], &last["choices"], &last["id"]), (&usage(5, 5, 1), &json!([]), &json!("b")));
        assert_eq!(merged.usage_event(), None);
    }

    #[test]
    fn an_error_passes_as_it_came() {
        let error = br#"{"error":{"message":"no"}}"#;
        let event = MergedAnswer::default().merge_event(part(3, false), error).unwrap();
        assert_eq!(event, Some(MergedEvent { data: Bytes::from_static(error), is_error: true }));
        assert!(MergedAnswer::default().merge_event(part(3, false), b"7").is_err());
    }
}
