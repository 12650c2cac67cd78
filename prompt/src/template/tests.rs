//! Tests of chat templates, against the output of the `transformers` library for the same template
//! and variables.

use serde_json::{Map, Value};

use super::*;

/// Cases made with transformers 5: idioms of well-known models' templates, and Python's results.
const CASES: &str = include_str!("tests/cases.json");

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    template: String,
    variables: Map<String, Value>,
    text: Option<String>,
    refused: Option<String>,
}

#[test]
fn templates_render_as_the_python_library_does() {
    let cases: Vec<Case> = serde_json::from_str(CASES).unwrap();
    let mut wrong = Vec::new();
    for case in cases {
        let rendered =
            Template::new(&case.template).map_err(|e| e.to_string()).and_then(|t| t.render(&case.variables).map_err(|e| e.to_string()));
        let same = match (&case.text, &rendered) {
            (Some(text), Ok(rendered)) => text == rendered,
            (None, Err(reason)) => reason.contains(case.refused.as_deref().unwrap_or_default()),
            _ => false,
        };
        if !same {
            wrong.push(format!("{}:\n  library: {:?}\n  here:    {:?}", case.name, case.text.or(case.refused), rendered));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
