use std::collections::BTreeSet;

use clap::CommandFactory;

use super::*;
use crate::{Cli, command};

/// Lines of the help of these words, on a terminal of 80 columns.
fn help(words: &[&str]) -> String {
    let shaped = shape(command(false)).term_width(80);
    let words = std::iter::once("hostler").chain(words.iter().copied());
    let error = shaped.try_get_matches_from(words).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::DisplayHelp), "{error}");
    error.to_string()
}

/// What a mistyped command line is answered with.
fn answer(words: &[&str]) -> String {
    let mut shaped = shape(command(false)).term_width(80);
    let words: Vec<OsString> = std::iter::once("hostler").chain(words.iter().copied()).map(OsString::from).collect();
    let error = shaped.try_get_matches_from_mut(&words).unwrap_err();
    explain(error, &mut shaped, &words).to_string()
}

#[test]
fn every_command_stands_under_one_heading() {
    let listed: Vec<&str> = GROUPS.iter().flat_map(|group| group.commands).map(|(name, _)| *name).collect();
    let commands = Cli::command();
    let known: BTreeSet<&str> = commands.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name).collect();
    assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), known);
    assert_eq!(listed.len(), known.len(), "none is listed twice");
}

#[test]
fn every_command_has_an_example_that_parses() {
    for (name, examples) in GROUPS.iter().flat_map(|group| group.commands) {
        assert!(!examples.is_empty(), "{name}");
        for example in *examples {
            let line = example.trim_start_matches("eval \"$(").trim_start_matches("source <(");
            let line = line.split(['#', '|', '&', ')']).next().unwrap();
            match command(false).try_get_matches_from(shlex::split(line).unwrap()) {
                Ok(matches) => assert_eq!(matches.subcommand_name(), Some(*name), "{example}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{example}: {error}"),
            }
        }
    }
}

#[test]
fn every_main_flag_is_one_of_its_command() {
    let commands = command(false);
    for (name, _, flags) in MAIN_FLAGS {
        let of_command = commands.find_subcommand(name).unwrap();
        for flag in flags {
            assert!(of_command.get_arguments().any(|arg| arg.get_id() == flag), "{name} has no {flag}");
        }
    }
}

#[test]
fn short_help_is_a_screen_and_long_help_has_all() {
    let (short, long) = (help(&["-h"]), help(&["--help"]));
    insta::assert_snapshot!(short);
    assert!(short.lines().count() <= 32, "{}", short.lines().count());
    for (name, _) in GROUPS.iter().flat_map(|group| group.commands) {
        assert!(long.contains(&format!("\n  {name} ")), "{name}");
    }
    let up = help(&["up", "-h"]);
    insta::assert_snapshot!(up);
    assert!(up.lines().count() <= 48, "{}", up.lines().count());
    let all = help(&["up", "--help"]);
    assert!(all.contains("--max-queue-wait") && all.contains("\nSettings of [router]:\n") && all.contains("Exit codes:"));
}

#[test]
fn lists_of_commands_fit_a_terminal() {
    let too_long: Vec<String> =
        [help(&["-h"]), help(&["--help"])].concat().lines().filter(|line| line.len() > 80).map(str::to_owned).collect();
    assert!(too_long.is_empty(), "{too_long:#?}");
}

#[test]
fn other_programs_words_mean_the_same_here() {
    for (typed, meant) in [("serve", "up"), ("run", "up"), ("stop", "down"), ("status", "ps")] {
        assert_eq!(shape(command(false)).try_get_matches_from(["hostler", typed]).unwrap().subcommand_name(), Some(meant));
    }
}

#[test]
fn only_a_typo_is_corrected() {
    let nonsense = answer(&["up", "--portt-of-call", "1"]);
    assert!(!nonsense.contains("similar") && nonsense.contains("Usage: hostler up [OPTIONS] [MODEL]"), "{nonsense}");
    assert!(nonsense.contains("behind `--`, as in `-- --portt-of-call`"), "{nonsense}");
    assert!(answer(&["up", "--lsiten", "a:1"]).contains("a similar argument exists: '--listen'"));
    assert!(answer(&["keys", "create", "--nmae", "a"]).contains("a similar argument exists: '--name'"));
    assert!(answer(&["stauts"]).contains("'status'") && answer(&["dwon"]).contains("'down'"));
    assert!(!answer(&["deploy"]).contains("similar"));
    assert!(answer(&["up", "tiny", "--api-key", "sk-1"]).contains("--api-key takes no key"));
}
