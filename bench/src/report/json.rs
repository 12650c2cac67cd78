//! The report as JSON, for scripts: all its data, with the version of the format.

use serde::Serialize;

use super::Report;

/// Version of the format.
///
/// New fields do not change it, but a field that is removed or changes its meaning does.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    format: &'static str,
    version: u32,
    #[serde(flatten)]
    report: &'a Report,
}

/// Whole report, one field per line, with a line break at the end.
#[must_use]
pub fn json(report: &Report) -> String {
    let document = Document { format: "hostler-bench", version: VERSION, report };
    let mut text = serde_json::to_string_pretty(&document).expect("a report has no keys but strings, and writing to memory does not fail");
    text.push('\n');
    text
}
