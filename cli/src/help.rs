//! What `-h` and `--help` show of the command line, and what a mistyped word is answered with.
//!
//! `-h` is a screen: what it is, an example, and what matters. `--help` has all. The tables below
//! say what stands where; a test compares them with the command line.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command};
use hostler_boot::config::nearest;

/// Heading of what concerns batch jobs.
pub(crate) const CLUSTER: &str = "A cluster";

/// Commands under a heading, each with its examples.
struct Group {
    heading: &'static str,
    commands: &'static [(&'static str, &'static [&'static str])],
}

/// All commands. The first group is described by `-h`, and the others but the last are named.
const GROUPS: [Group; 5] = [
    Group {
        heading: "Every day",
        commands: &[
            (
                "up",
                &[
                    "hostler up Qwen/Qwen3-8B -- --max-model-len 16384   # vLLM's arguments behind --",
                    "hostler up --attach http://127.0.0.1:9000           # a server that runs already",
                    "hostler up Qwen/Qwen3-8B --nodes 2 --walltime 2:00:00",
                ],
            ),
            ("ps", &["hostler ps", "hostler ps --json | jq .findings"]),
            ("env", &["eval \"$(hostler env)\" && python my_openai_client.py"]),
            ("logs", &["hostler logs -f gpu-host-1/0"]),
            ("wait", &["hostler wait --timeout 10m && python my_openai_client.py"]),
            ("down", &["hostler down", "hostler down Qwen3-8B"]),
            ("top", &["hostler top"]),
            ("page", &["hostler page"]),
            ("doctor", &["hostler doctor --model Qwen/Qwen3-8B"]),
            (
                "plan",
                &[
                    "hostler plan Qwen/Qwen3-8B",
                    "hostler plan meta-llama/Llama-3.1-70B --gpus 4x80 --nvlink   # another machine",
                    "hostler plan meta-llama/Llama-3.1-405B --gpus 4x80 --nvlink --nodes-per-replica 4   # one replica over four such nodes",
                ],
            ),
            ("explain", &["hostler explain", "hostler explain 1c2f-0a3b   # an answer's x-hostler-id"]),
            ("advise", &["hostler advise"]),
        ],
    },
    Group {
        heading: CLUSTER,
        commands: &[
            ("init", &["hostler init --site polaris", "hostler init --site list"]),
            ("scale", &["hostler scale --nodes 3"]),
            ("connect", &["hostler connect alice@login1.example.org"]),
            ("router", &["hostler router --listen 0.0.0.0:8000 --tls-cert edge.pem --tls-key edge.key"]),
            ("agent", &["hostler agent --router router-host:8001 --join-token-file join-token --model Qwen/Qwen3-8B"]),
            ("controller", &["hostler controller"]),
            ("token", &["hostler token create --uses 4 --out join-token"]),
        ],
    },
    Group {
        heading: "Operators",
        commands: &[
            ("keys", &["hostler keys create --name alice --out alice.key"]),
            ("drain", &["hostler drain gpu-host-1"]),
            ("restart", &["hostler restart gpu-host-1/0", "hostler restart --rolling all"]),
            ("release", &["hostler release gpu-host-1/0"]),
            ("sleep", &["hostler sleep gpu-host-1"]),
            ("wake", &["hostler wake gpu-host-1"]),
            ("lora", &["hostler lora load sql-adapter /adapters/sql"]),
            ("usage", &["hostler usage --since 30d --by key", "hostler usage --json | jq .nodes"]),
            ("report", &["hostler report"]),
        ],
    },
    Group {
        heading: "Tools",
        commands: &[
            ("batch", &["hostler batch in.jsonl out.jsonl"]),
            ("bench", &["hostler bench sustained --target http://127.0.0.1:8000/v1 --model Qwen/Qwen3-8B"]),
            ("check", &["hostler check ~/.config/hostler/hostler.toml"]),
            ("completions", &["source <(hostler completions bash)"]),
        ],
    },
    Group {
        heading: "Development",
        commands: &[
            ("sim", &["hostler sim engine --help"]),
            ("simulate", &["hostler simulate --help"]),
            ("docs", &["hostler docs config"]),
        ],
    },
];

/// Flags that `-h` shows of commands that have a flag for each setting, under their headings.
const MAIN_FLAGS: [(&str, &str, &[&str]); 10] = [
    ("up", "This machine", &["port", "listen", "api_key", "gpus", "replicas", "tp", "attach"]),
    ("up", CLUSTER, &["nodes", "walltime"]),
    ("plan", "Engines", &["model", "replicas", "tp", "profile"]),
    ("router", "Addresses", &["listen", "agents_listen", "admin_listen"]),
    ("router", "Who may call", &["keys_file", "tls_cert", "tls_key", "tls_dir", "allow_plain_text"]),
    ("agent", "Routers", &["router", "join_token_file", "node"]),
    ("agent", "Engines", &["model", "gpus", "replicas", "tp", "attach"]),
    ("controller", "Addresses", &["listen", "admin_listen"]),
    ("controller", "Who may call", &["keys_file", "tls_dir"]),
    ("controller", CLUSTER, &["scheduler", "state_dir"]),
];

/// Arranges the help of all commands by the tables.
pub(crate) fn shape(command: Command) -> Command {
    let command = shape_list(command);
    GROUPS.iter().flat_map(|group| group.commands).fold(command, |command, (name, examples)| {
        command.mut_subcommand(name, |command| shape_flags(command).help_template(template(examples, "\n\n{all-args}{after-help}")))
    })
}

fn template(examples: &[&str], rest: &str) -> String {
    let examples: String = examples.iter().map(|example| format!("  {example}\n")).collect();
    format!("{{about-with-newline}}\n{examples}\n{{usage-heading}} {{usage}}{rest}")
}

/// Gives the program's own help its list of commands. A template has one list for both kinds of
/// help, so what is after the help takes that place.
fn shape_list(command: Command) -> Command {
    let described = |group: &Group| {
        let rows = group.commands.iter().map(|(name, _)| format!("  {name:<11}  {}\n", about(&command, name)));
        format!("{}:\n{}", group.heading, rows.collect::<String>())
    };
    let named = |group: &Group| {
        let names: Vec<&str> = group.commands.iter().map(|(name, _)| *name).collect();
        format!("  {:<9}  {}\n", group.heading, names.join(", "))
    };
    let (everyday, others) = (described(&GROUPS[0]), GROUPS[1..GROUPS.len() - 1].iter().map(named).collect::<String>());
    let all: Vec<String> = GROUPS.iter().map(described).collect();
    let examples = [
        "hostler up Qwen/Qwen3-8B    # on this machine, with vLLM on the PATH",
        "eval \"$(hostler env)\"       # in another terminal, for any client",
    ];
    command
        .after_help(format!("{everyday}\nWith `hostler --help`:\n{}", others.trim_end()))
        .after_long_help(all.join("\n").trim_end().to_owned())
        .help_template(template(&examples, "{after-help}\n\nOptions:\n{options}"))
}

fn about(command: &Command, name: &str) -> String {
    command.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string).unwrap_or_default()
}

/// Puts the main flags under their headings. Other flags of settings are left to `--help`.
fn shape_flags(command: Command) -> Command {
    let name = command.get_name().to_owned();
    command.mut_args(|arg| {
        let is_setting = arg.get_help_heading().is_some_and(|heading| heading.starts_with("Settings of"));
        match MAIN_FLAGS.iter().find(|(of, _, flags)| *of == name && flags.contains(&arg.get_id().as_str())) {
            Some((_, heading, _)) => arg.help_heading(*heading),
            None => {
                if is_setting {
                    arg.hide_short_help(true)
                } else {
                    arg
                }
            }
        }
    })
}

/// Parses a command line, or prints the error or the help and exits.
pub(crate) fn parse(mut command: Command, words: Vec<OsString>) -> ArgMatches {
    match command.try_get_matches_from_mut(&words) {
        Ok(matches) => matches,
        Err(error) => explain(error, &mut command, &words).exit(),
    }
}

/// Replaces the suggestions of clap, which finds `stop-grace` near `port`.
fn explain(mut error: clap::Error, command: &mut Command, words: &[OsString]) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = text(&error, ContextKind::InvalidSubcommand);
            error.remove(ContextKind::SuggestedSubcommand);
            let names = command.get_subcommands().filter(|command| !command.is_hide_set());
            let names = names.flat_map(|command| std::iter::once(command.get_name()).chain(command.get_all_aliases()));
            if let Some(name) = nearest(&typed, names) {
                error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![name.to_owned()]));
            }
        }
        ErrorKind::UnknownArgument => {
            let typed = text(&error, ContextKind::InvalidArg);
            let named = named_command(command, words);
            error.remove(ContextKind::SuggestedArg);
            error.insert(ContextKind::Usage, ContextValue::StyledStr(named.render_usage()));
            let flags = named.get_arguments().filter_map(|arg| arg.get_long());
            if let Some(flag) = nearest(typed.trim_start_matches('-'), flags).filter(|_| typed.starts_with("--")) {
                error.insert(ContextKind::SuggestedArg, ContextValue::String(format!("--{flag}")));
            }
            let is_key = words.windows(2).any(|pair| pair[0] == "--api-key" && !pair[1].to_string_lossy().starts_with('-'));
            if is_key {
                let tip = "--api-key takes no key, which every user of this host would see; yours is made, and `hostler env` has it";
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
            } else if typed.starts_with('-') && named.get_arguments().any(|arg| arg.is_last_set()) {
                let tip = format!("arguments of the engines come last, behind `--`, as in `-- {typed}`");
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
            }
        }
        _ => {}
    }
    error
}

/// The subcommand that these words name, however deep.
fn named_command<'a>(command: &'a mut Command, words: &[OsString]) -> &'a mut Command {
    let mut named = command;
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        if named.find_subcommand(word).is_some() {
            named = named.find_subcommand_mut(word).expect("it was found");
        }
    }
    named
}

#[cfg(test)]
mod tests;
