//! Generated files equal the program's present output, and the examples are sound.

use std::path::Path;

use crate::harness::hostler;

async fn assert_generated(part: &str, file: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let printed = hostler(&["docs", part]).await;
    assert!(printed.success, "{}", printed.stderr);
    assert!(
        kept == printed.stdout,
        "{file} is not what the program says; write it anew:\n    cargo run --bin hostler -- docs {part} > {file}"
    );
}

#[tokio::test]
async fn the_manual_of_settings_is_up_to_date() {
    assert_generated("config", "docs/config.md").await;
}

#[tokio::test]
async fn the_manual_of_metrics_is_up_to_date() {
    assert_generated("metrics", "docs/metrics.md").await;
}

#[tokio::test]
async fn the_example_with_every_setting_is_up_to_date() {
    assert_generated("example", "deploy/config/full.toml").await;
}

#[tokio::test]
async fn the_schema_for_editors_is_up_to_date() {
    assert_generated("schema", "deploy/config/hostler.schema.json").await;
}

#[tokio::test]
async fn the_example_files_are_valid() {
    for file in ["minimal.toml", "full.toml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/config").join(file);
        let checked = hostler(&["check", path.to_str().unwrap()]).await;
        assert!(checked.success, "{}", checked.stderr);
    }
}
