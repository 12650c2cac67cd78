//! Splits the body of a request of several answers into bodies of one answer each.

use std::borrow::Cow;
use std::fmt;

use bytes::Bytes;
use hostler_api::Route;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Most answers of one request. Each is a request of its own at the engine.
const MAX_ANSWERS: usize = 128;

/// Bytes that the split bodies may have beyond twice the original's, those that are alike counted
/// once: they are kept.
const MAX_EXTRA_BYTES: usize = 1024 * 1024;

/// Bytes that may be sent to the engine beyond eight times the original's, so that a client's bytes
/// cost no more than a few of its own.
const MAX_EXTRA_SENT_BYTES: usize = 4 * 1024 * 1024;

/// Floating-point numbers below this are exact: 2^53.
const MOST_EXACT: f64 = 9_007_199_254_740_992.0;

/// Temperatures below this are greedy (vLLM's `_SAMPLING_EPS`).
const GREEDY_BELOW: f64 = 1e-5;

/// A request as one for each of its answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FanOut {
    /// Bodies in the order of the answers' indices: all choices of a prompt, then those of the next.
    pub(super) bodies: Vec<Bytes>,
    /// Answers to each prompt.
    pub(super) choices: usize,
}

/// The kind of request that is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FanOutForm {
    Chat,
    Completion,
}

impl FanOutForm {
    pub(crate) fn for_route(route: Route) -> Option<Self> {
        match route {
            Route::ChatCompletions => Some(Self::Chat),
            Route::Completions => Some(Self::Completion),
            _ => None,
        }
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FanOutError {
    #[error("a request may ask for {MAX_ANSWERS} answers at most (prompts × n): send several requests")]
    TooMany,
    #[error("n must be 1 when using greedy sampling, got {0}.")]
    Greedy(usize),
    #[error("the request is too long for so many answers: send several requests, or leave out `seed`")]
    TooLong,
}

impl FanOut {
    /// Splits a body of several answers. `None` if it has one, or says something that only the
    /// engine can judge.
    ///
    /// # Errors
    /// If its answers are too many or would be the same, or the split bodies would be too long.
    pub(crate) fn split(form: FanOutForm, body: &Bytes) -> Result<Option<Self>, FanOutError> {
        let Some(request) = SplitRequest::parse(form, body) else { return Ok(None) };
        let SplitRequest { prompts, choices, has_list, .. } = &request;
        let count = prompts.len().max(1).saturating_mul(*choices);
        // A list of one prompt is a list, too.
        if count <= 1 && !has_list {
            return Ok(None);
        }
        if count > MAX_ANSWERS {
            return Err(FanOutError::TooMany);
        }
        if *choices > 1 && request.is_greedy() {
            return Err(FanOutError::Greedy(*choices));
        }
        let mut bodies: Vec<Bytes> = Vec::with_capacity(count);
        let (mut kept, mut sent) = (0, 0);
        for index in 0..count {
            let (prompt, choice) = (index / *choices, index % *choices);
            // Choices differ by their seed only.
            let own = if choice > 1 && request.seed.is_none() {
                bodies[index - 1].clone()
            } else {
                let own = Bytes::from(request.body_of(prompt, choice, index == 0));
                kept += own.len();
                own
            };
            sent += own.len();
            if kept > 2 * body.len() + MAX_EXTRA_BYTES || sent > 8 * body.len() + MAX_EXTRA_SENT_BYTES {
                return Err(FanOutError::TooLong);
            }
            bodies.push(own);
        }
        Ok(Some(Self { bodies, choices: *choices }))
    }
}

/// The fields of a body in their order, without those that are set anew for each answer.
struct SplitRequest<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// Each prompt of a completion; none for a chat.
    prompts: Vec<&'a RawValue>,
    /// Whether the prompts are in a list.
    has_list: bool,
    choices: usize,
    /// The first choice's seed.
    seed: Option<i64>,
    /// The client's id for the answer, which only one request may have.
    id: Option<&'a RawValue>,
}

impl<'a> SplitRequest<'a> {
    fn parse(form: FanOutForm, body: &'a [u8]) -> Option<Self> {
        let BodyFields(all) = serde_json::from_slice(body).ok()?;
        let (mut fields, mut prompt, mut n, mut seed, mut id) = (Vec::with_capacity(all.len()), None, None, None, None);
        for (name, value) in all {
            let place = match &*name {
                "prompt" if form == FanOutForm::Completion => &mut prompt,
                "n" => &mut n,
                "seed" => &mut seed,
                "request_id" => &mut id,
                // The engine judges what has no meaning here.
                "best_of" | "use_beam_search" | "prompt_embeds" if !matches!(value.get(), "null" | "false" | "1") => return None,
                _ => {
                    fields.push((name, value));
                    continue;
                }
            };
            if place.replace(value).is_some() {
                return None;
            }
        }
        let set = |value: Option<&'a RawValue>| value.filter(|value| value.get() != "null");
        let choices = usize::try_from(set(n).map_or(Some(1), whole_number)?).ok()?;
        // To vLLM, -1 means no seed.
        let seed = match set(seed) {
            Some(seed) => Some(whole_number(seed)?).filter(|seed| *seed != -1),
            None => None,
        };
        let (prompts, has_list) = match form {
            FanOutForm::Chat => (Vec::new(), false),
            FanOutForm::Completion => split_prompts(set(prompt)?),
        };
        (choices > 0).then_some(Self { fields, prompts, has_list, choices, seed, id: set(id) })
    }

    /// Whether all choices would be the same. vLLM's Python front-end refuses that in these words.
    fn is_greedy(&self) -> bool {
        let temperature = self.fields.iter().find(|(name, _)| name == "temperature");
        temperature.and_then(|(_, value)| value.get().parse::<f64>().ok()).is_some_and(|temperature| temperature < GREEDY_BELOW)
    }

    fn body_of(&self, prompt: usize, choice: usize, is_first: bool) -> String {
        let mut body = String::from("{");
        let mut put = |name: &str, value: &str| {
            body.push_str(if body.len() > 1 { "," } else { "" });
            body.push_str(&serde_json::Value::from(name).to_string());
            body.push(':');
            body.push_str(value);
        };
        for (name, value) in &self.fields {
            put(name, value.get());
        }
        if let Some(prompt) = self.prompts.get(prompt) {
            put("prompt", prompt.get());
        }
        // vLLM's own rule for the seeds of several choices (`ParentRequest`).
        if let Some(seed) = self.seed {
            put("seed", &seed.wrapping_add_unsigned(choice as u64).to_string());
        }
        if let Some(id) = self.id.filter(|_| is_first) {
            put("request_id", id.get());
        }
        body.push('}');
        body
    }
}

/// A whole number, also in a text or with a fraction of zero, as pydantic reads it.
fn whole_number(value: &RawValue) -> Option<i64> {
    let text = value.get().trim_matches('"');
    #[expect(clippy::cast_possible_truncation, reason = "2^53 is below 2^63")]
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < MOST_EXACT).then_some(number as i64);
    text.parse().ok().or_else(|| text.parse::<f64>().ok().and_then(whole))
}

/// The prompts of a completion, and whether they are in a list. A prompt is a text or a list of
/// tokens.
fn split_prompts(prompt: &RawValue) -> (Vec<&RawValue>, bool) {
    let all = |items: &[&RawValue], first: char| items.iter().all(|item| item.get().starts_with(first));
    match serde_json::from_str::<Vec<&RawValue>>(prompt.get()) {
        Ok(items) if !items.is_empty() && (all(&items, '"') || all(&items, '[')) => (items, true),
        _ => (vec![prompt], false),
    }
}

/// An object's fields in their order, repeated ones too.
struct BodyFields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for BodyFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BodyFieldsVisitor;

        impl<'de> Visitor<'de> for BodyFieldsVisitor {
            type Value = BodyFields<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BodyFields<'de>, A::Error> {
                #[derive(Deserialize)]
                struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

                let mut fields = Vec::new();
                while let Some((Name(name), value)) = map.next_entry()? {
                    fields.push((name, value));
                }
                Ok(BodyFields(fields))
            }
        }

        deserializer.deserialize_map(BodyFieldsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn split(form: FanOutForm, body: &Value) -> Option<Vec<Value>> {
        let fan_out = FanOut::split(form, &body.to_string().into()).unwrap()?;
        Some(fan_out.bodies.iter().map(|body| serde_json::from_slice(body).unwrap()).collect())
    }

    #[test]
    fn each_choice_is_a_request_with_its_seed() {
        let plain = json!({"model": "m", "messages": [], "n": 3, "request_id": "mine", "stream": true});
        let parts = split(FanOutForm::Chat, &plain).unwrap();
        assert_eq!(parts[0], json!({"model": "m", "messages": [], "stream": true, "request_id": "mine"}));
        assert_eq!(parts[1..], vec![json!({"model": "m", "messages": [], "stream": true}); 2]);
        let seeded = split(FanOutForm::Chat, &json!({"seed": 7, "n": 3})).unwrap();
        assert_eq!(seeded, [7, 8, 9].map(|seed| json!({"seed": seed})));
        for (n, seed) in [(json!("2"), json!("7")), (json!(2.0), json!(7.0)), (json!(2), json!(7))] {
            let parts = split(FanOutForm::Chat, &json!({"n": n, "seed": seed})).unwrap();
            assert_eq!(parts, [7, 8].map(|seed| json!({"seed": seed})));
        }
    }

    #[test]
    fn each_prompt_is_a_request_of_each_choice() {
        let part = |prompt: Value, seed: u32| json!({"prompt": prompt, "seed": seed});
        for [one, two] in [[json!("a"), json!("b")], [json!([3]), json!([1, 2])]] {
            let parts = split(FanOutForm::Completion, &json!({"prompt": [one.clone(), two.clone()], "n": 2, "seed": 5})).unwrap();
            assert_eq!(parts, [part(one.clone(), 5), part(one, 6), part(two.clone(), 5), part(two, 6)]);
        }
        assert_eq!(split(FanOutForm::Completion, &json!({"prompt": ["a"]})).unwrap(), [json!({"prompt": "a"})]);
    }

    #[test]
    fn requests_of_one_answer_and_unknown_ones_stay_whole() {
        for body in [
            json!({"prompt": "a"}),
            json!({"prompt": [1, 2, 3]}),
            json!({"prompt": ["a", "b"], "best_of": 3}),
            json!({"prompt": ["a", "b"], "use_beam_search": true}),
            json!({"prompt": ["a", "b"], "n": 0}),
            json!({"prompt": ["a", [1]]}),
            json!({"prompt": ["a", "b"], "n": "two"}),
            json!({"prompt": ["a", "b"], "seed": 1.5}),
            json!({"n": 2}),
        ] {
            assert_eq!(split(FanOutForm::Completion, &body), None, "{body}");
        }
        let twice = Bytes::from_static(br#"{"n":2,"n":3}"#);
        assert_eq!(FanOut::split(FanOutForm::Chat, &twice), Ok(None));
    }

    #[test]
    fn answers_and_bytes_are_bounded() {
        let of = |body: Value| FanOut::split(FanOutForm::Chat, &body.to_string().into());
        assert_eq!(of(json!({"n": 129})), Err(FanOutError::TooMany));
        assert_eq!(of(json!({"n": 2, "temperature": 0.0})), Err(FanOutError::Greedy(2)));
        assert_eq!(of(json!({"n": 1_u64 << 40})), Err(FanOutError::TooMany));
        let long = "a".repeat(1024 * 1024);
        assert_eq!(of(json!({"n": 8, "seed": 1, "user": long})), Err(FanOutError::TooLong));
        assert_eq!(of(json!({"n": 8, "user": long})).unwrap().unwrap().bodies.len(), 8, "bodies without a seed are shared");
        assert_eq!(of(json!({"n": 128, "user": long})), Err(FanOutError::TooLong), "all are sent");
    }
}
