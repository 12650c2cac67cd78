//! The report as JSON, for scripts: everything in it, with the version of the format.

use serde::Serialize;

use super::Report;

/// Of the format. Fields are added without a new version; one that changes its meaning or goes away makes a new one.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    format: &'static str,
    version: u32,
    #[serde(flatten)]
    report: &'a Report,
}

/// The whole report, with a line for each field and one at the end.
#[must_use]
pub fn json(report: &Report) -> String {
    let document = Document { format: "hostler-bench", version: VERSION, report };
    let mut text = serde_json::to_string_pretty(&document).expect("a report has no keys but strings, and writing to memory does not fail");
    text.push('\n');
    text
}
