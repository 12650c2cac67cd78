//! Streams of an engine for the tests of every translation: cut anywhere, with any deltas.

use proptest::prelude::*;
use serde_json::{Value, json};

/// Cuts bytes at these places.
pub(in crate::edge) fn pieces<'a>(stream: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    cuts.extend([0, stream.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect()
}

/// The delta of a chunk with some part of an answer.
pub(in crate::edge) fn any_delta() -> impl Strategy<Value = Value> {
    let text = || "[a-z ]{0,3}";
    prop_oneof![
        text().prop_map(|text| json!({"content": text})),
        text().prop_map(|text| json!({"reasoning": text})),
        (0..3_usize, text()).prop_map(|(index, text)| json!({"tool_calls": [{"index": index, "id": format!("t{index}"), "function": {"name": "look", "arguments": text}}]})),
        (0..3_usize, text()).prop_map(|(index, text)| json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})),
    ]
}
