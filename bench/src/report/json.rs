//! The report as JSON, for scripts: everything in it, with the version of the format.

use serde::Serialize;

use super::Report;

/// Version of the format. New fields do not change it; a field that changes its meaning or goes
/// away does.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    format: &'static str,
    version: u32,
    #[serde(flatten)]
    report: &'a Report,
}

/// The whole report, one field per line, with a line break at the end.
#[must_use]
pub fn json(report: &Report) -> String {
    let document = Document { format: "hostler-bench", version: VERSION, report };
    let mut text = serde_json::to_string_pretty(&document).expect("a report has no keys but strings, and writing to memory does not fail");
    text.push('\n');
    text
}
