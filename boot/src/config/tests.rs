use std::io::Write;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// Walks.
    #[default]
    Slow,
    /// Runs.
    Fast,
}

/// A section for the tests.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Example {
    /// Where it listens.
    listen: String,
    /// How many.
    workers: u32,
    /// How long it waits.
    #[serde(with = "crate::duration")]
    #[schemars(with = "String")]
    drain_timeout: Duration,
    /// Who it calls.
    peers: Vec<String>,
    /// How it moves.
    mode: Mode,
}

impl Default for Example {
    fn default() -> Self {
        Self { listen: "127.0.0.1:1".into(), workers: 4, drain_timeout: Duration::from_secs(30), peers: vec![], mode: Mode::Slow }
    }
}

fn sections() -> Vec<Section> {
    vec![Section::of::<Example>("example")]
}

fn load(file: Option<&str>, environment: &[(&str, &str)], flags: &[&str]) -> Result<Example, ConfigError> {
    let sections = sections();
    let mut on_disk = tempfile::NamedTempFile::new().unwrap();
    on_disk.write_all(file.unwrap_or_default().as_bytes()).unwrap();
    let command = clap::Command::new("test").args(Settings::flags(&sections));
    let matches = command.try_get_matches_from(std::iter::once("test").chain(flags.iter().copied())).unwrap();
    let sources = SettingSources {
        file: file.is_some().then_some(on_disk.path()),
        environment: environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        flags: Some(&matches),
    };
    Settings::load(&sections, &sources)?.section("example")
}

#[test]
fn flags_override_the_environment_which_overrides_the_file() {
    let file = "[example]\nlisten = \"file:1\"\nworkers = 1\ndrain_timeout = \"1m\"\n";
    let example =
        load(Some(file), &[("HOSTLER_EXAMPLE_LISTEN", "environment:2"), ("HOSTLER_EXAMPLE_WORKERS", "2")], &["--workers", "3"]).unwrap();
    assert_eq!((example.workers, example.listen.as_str(), example.drain_timeout), (3, "environment:2", Duration::from_secs(60)));
    assert_eq!(example.mode, Mode::Slow, "what no source names keeps its default");
}

#[test]
fn lists_are_repeated_flags_or_comma_separated_variables() {
    assert_eq!(load(None, &[("HOSTLER_EXAMPLE_PEERS", "a:1, b:2")], &[]).unwrap().peers, ["a:1", "b:2"]);
    assert_eq!(load(None, &[], &["--peers", "a:1", "--peers", "b:2"]).unwrap().peers, ["a:1", "b:2"]);
}

#[test]
fn an_unknown_key_suggests_the_nearest_with_file_and_line() {
    let error = load(Some("[example]\n\nlisen = \"x\"\n"), &[], &[]).unwrap_err().to_string();
    assert!(error.contains(":3: unknown key `example.lisen`; did you mean `example.listen`?"), "{error}");
    let error = load(Some("[exmple]\n"), &[], &[]).unwrap_err().to_string();
    assert!(error.contains(":1: unknown key `exmple`; did you mean `example`?"), "{error}");
}

#[test]
fn what_is_no_typo_gets_no_suggestion() {
    let near = |name| nearest(name, ["sleep", "keys", "stop-grace", "listen", "max-queued"].into_iter());
    assert_eq!([near("serve"), near("port"), near("liste"), near("lsiten")], [None, None, Some("listen"), Some("listen")]);
    assert_eq!([near("key"), near("max-queue"), near("max-quueud")], [Some("keys"), Some("max-queued"), Some("max-queued")]);
}

#[test]
fn all_mistakes_of_a_file_are_found_at_once() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"other = 1\n[example]\nlisen = \"x\"\nworkers = -1\nmode = \"quick\"\npeers = [\"a:1\", 2]\n").unwrap();
    let found: Vec<String> = Settings::mistakes(&sections(), file.path()).unwrap().first.iter().map(ToString::to_string).collect();
    let expected = [
        ":1: unknown key `other`",
        ":3: unknown key `example.lisen`; did you mean `example.listen`?",
        ":4: example.workers: a whole number from 0 on was expected, not -1",
        ":5: example.mode: one of slow, fast was expected, not quick",
        ":6: example.peers[1]: a text in quotes was expected, not 2",
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "{found}\nshould contain {expected}");
    }
}

#[test]
fn the_first_sentence_of_a_meaning_is_its_summary() {
    let summary = |doc: &str| Setting { doc: doc.to_owned(), ..sections()[0].settings[0].clone() }.summary().to_owned();
    assert_eq!(summary("Where it listens."), "Where it listens");
    assert_eq!(summary("At 127.0.0.1:8000, e.g. so. Beyond it, set `b`. More."), "At 127.0.0.1:8000, e.g. so");
}

#[test]
fn a_duration_without_a_unit_is_refused_with_one() {
    for number in ["5", "0.5", "-1"] {
        let error = load(Some(&format!("[example]\ndrain_timeout = {number}\n")), &[], &[]).unwrap_err().to_string();
        assert!(error.contains(&format!("not {number}: write \"{number}s\" for seconds, or \"{number}ms\"")), "{error}");
        let error = load(None, &[("HOSTLER_EXAMPLE_DRAIN_TIMEOUT", number)], &[]).unwrap_err().to_string();
        assert!(error.contains(&format!("write \"{number}s\"")), "{error}");
    }
}

#[test]
fn an_absent_optional_duration_is_an_empty_text() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Wait {
        #[serde(with = "crate::duration::optional")]
        limit: Option<Duration>,
    }
    for (text, limit) in [("", None), (" ", None), ("0s", Some(0)), ("1m 30s", Some(90))] {
        let wait: Wait = toml::from_str(&format!("limit = {text:?}")).unwrap();
        assert_eq!(wait.limit, limit.map(Duration::from_secs), "{text:?}");
        let written = toml::to_string(&wait).unwrap();
        assert_eq!(toml::from_str::<Wait>(&written).unwrap(), wait);
    }
    assert!(toml::from_str::<Wait>("limit = 5").unwrap_err().to_string().contains("write \"5s\""));
}

#[test]
fn a_key_in_two_sections_is_found_in_its_own() {
    let sections = [sections(), vec![Section::of::<Example>("other")]].concat();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    // A line within a text is no key.
    file.write_all(b"[other]\nlisten = \"\"\"\nworkers = 1\n\"\"\"\n[example]\nlisten = \"a\"\nworkers = \"many\"\n").unwrap();
    let found = Settings::mistakes(&sections, file.path()).unwrap().first;
    assert!(found.len() == 1 && found[0].to_string().contains(":7: example.workers"), "{found:?}");
}

#[test]
fn only_the_first_of_many_mistakes_are_put_into_words() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let unknown = (0..10_000).map(|index| format!("unknown_key_{index} = 1\n")).collect::<String>();
    file.write_all(format!("[example]\n{unknown}{} = 1\n", "x".repeat(100_000)).as_bytes()).unwrap();
    let found = Settings::mistakes(&sections(), file.path()).unwrap();
    assert_eq!((found.first.len(), found.more), (20, 9981));
    assert!(found.first[19].to_string().contains(":21: unknown key `example.unknown_key_19`"), "{}", found.first[19]);
}

#[test]
fn a_file_without_an_end_is_refused() {
    for (path, words) in [("/dev/zero", "is larger than 1024 KiB"), ("/", "cannot read the configuration file")] {
        let error = Settings::mistakes(&sections(), Path::new(path)).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.is_ok_and(|made| made.success()));
    let error = Settings::mistakes(&sections(), &pipe).unwrap_err().to_string();
    assert!(error.contains("it is a pipe or a socket"), "{error}");
}

#[test]
fn a_bad_value_names_its_place_key_and_expected_type() {
    for (file, environment, flags, expected) in [
        (
            Some("[example]\nworkers = \"many\"\n"),
            &[][..],
            &[][..],
            "2: example.workers: a whole number from 0 on was expected, not \"many\"",
        ),
        (
            None,
            &[("HOSTLER_EXAMPLE_WORKERS", "many")][..],
            &[][..],
            "HOSTLER_EXAMPLE_WORKERS: example.workers: a whole number was expected, not \"many\"",
        ),
        (None, &[][..], &["--mode", "medium"][..], "flag --mode: example.mode: one of slow, fast was expected, not \"medium\""),
        (
            Some("[example]\ndrain_timeout = \"soon\"\n"),
            &[][..],
            &[][..],
            "2: example.drain_timeout: a duration such as \"10s\" or \"5m\" was expected",
        ),
        (Some("[example]\nworkers = -1\n"), &[][..], &[][..], "2: example.workers: a whole number from 0 on was expected, not -1"),
        (Some("[example\n"), &[][..], &[][..], "is not valid TOML"),
        (Some("example = 3\n"), &[][..], &[][..], "a section was expected"),
    ] {
        let error = load(file, environment, flags).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\nshould contain {expected}");
    }
}

#[test]
fn the_example_file_is_read_back_as_the_defaults() {
    let read = load(Some(&example_file(&sections())), &[], &[]).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), serde_json::to_value(Example::default()).unwrap());
}

#[test]
fn the_manual_names_key_default_flag_environment_and_meaning() {
    let manual = markdown(&sections());
    assert!(
        manual.contains("| `drain_timeout` | `\"30s\"` | `--drain-timeout` `HOSTLER_EXAMPLE_DRAIN_TIMEOUT` | How long it waits. |"),
        "{manual}"
    );
}

#[test]
fn an_editors_schema_has_each_setting_with_its_kind_meaning_and_default() {
    let schema: serde_json::Value = serde_json::from_str(&json_schema(&sections())).unwrap();
    let section = &schema["properties"]["example"];
    assert_eq!((&section["additionalProperties"], &schema["additionalProperties"]), (&false.into(), &false.into()), "typos are marked");
    let settings = &section["properties"];
    assert_eq!(settings["workers"], serde_json::json!({"type": "integer", "description": "How many.", "default": 4}));
    assert_eq!(settings["mode"], serde_json::json!({"enum": ["slow", "fast"], "description": "How it moves.", "default": "slow"}));
    assert_eq!((&settings["drain_timeout"]["type"], &settings["peers"]["items"]["type"]), (&"string".into(), &"string".into()));
}
