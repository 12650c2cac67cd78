//! `hostler up --service`: a unit of the user's systemd that runs the same command, so that a model
//! comes back after a restart of the host.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use hostler_agent::AgentConfig;
use hostler_boot::Settings;
use hostler_router::RouterConfig;
use hostler_tls::write_private;

use super::served_name;
use crate::cluster::name_of_model;
use crate::controller_service::{quote_assignments, quote_command, units};
use crate::output::say;

/// The flag that writes a unit instead of serving.
const FLAG: &str = "--service";

/// Time for the last reports and for the processes of engines, beside what the settings give.
const MORE_TIME: Duration = Duration::from_secs(20);

/// What a unit is made of.
#[derive(Debug)]
struct UpUnit {
    /// The model; empty for the simulated engine.
    model: String,
    /// Absolute path of this program, and the words after it.
    command: Vec<String>,
    /// Variables as `NAME=value`.
    environment: Vec<String>,
    /// For paths that the words have from here.
    folder: String,
    /// How long it may take to leave.
    leave: Duration,
}

/// Writes the unit, and says how it is started.
///
/// # Errors
/// When the settings name no engine, or the unit cannot be written.
pub(crate) fn write_service(settings: &Settings) -> anyhow::Result<()> {
    let (agent, router): (AgentConfig, RouterConfig) = (settings.section("agent")?, settings.section("router")?);
    hostler_agent::check_engine(&agent)?;
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let program = program.into_os_string().into_string().ok().context("a path that is no text cannot be written in a unit")?;
    let folder = std::env::current_dir().context("there is no working directory")?.display().to_string();
    let unit = UpUnit {
        model: served_name(&agent),
        command: std::iter::once(program).chain(words(std::env::args_os().skip(1))?).collect(),
        environment: kept_environment(std::env::vars()),
        folder,
        leave: router.drain_timeout + agent.drain_timeout + agent.stop_grace + MORE_TIME,
    };
    let name = unit.name();
    let units = units().context("there is no home folder to keep a unit of systemd in")?;
    let file = units.join(format!("{name}.service"));
    write(&file, &unit.text())?;
    say(&format!("service {}", file.display()));
    say(&format!("start   systemctl --user daemon-reload && systemctl --user enable --now {name}"));
    say("stay    loginctl enable-linger    # once: it runs while you are logged out, and after a restart of the host");
    say(&format!(
        "next    `hostler wait` waits for it, `journalctl --user -fu {name}` follows its log, `systemctl --user disable --now {name}` ends it"
    ));
    Ok(())
}

fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    write_private(file, text.as_bytes()).with_context(|| format!("cannot write {}", file.display()))
}

/// The words of this command line but for the flag. What comes after `--` is for the engine.
fn words(given: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<String>> {
    let mut is_engines = false;
    let mut words = Vec::new();
    for word in given {
        let word = word.into_string().ok().context("a word that is no text cannot be written in a unit")?;
        ensure!(!word.contains('\n'), "a word with a line break cannot be written in a unit");
        is_engines |= word == "--";
        if is_engines || word != FLAG {
            words.push(word);
        }
    }
    Ok(words)
}

/// Variables by which the program, the engine and the model are found; systemd has its own values.
/// None that hold a secret: others may read a unit.
fn kept_environment(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    const NAMES: [&str; 9] = [
        "PATH",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "XDG_CONFIG_HOME",
        "XDG_STATE_HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "CUDA_VISIBLE_DEVICES",
    ];
    let is_kept = |name: &str| NAMES.contains(&name) || (name.starts_with("HOSTLER_") && !name.ends_with("_KEY"));
    let mut kept: Vec<String> =
        variables.filter(|(name, value)| is_kept(name) && !value.contains('\n')).map(|(name, value)| format!("{name}={value}")).collect();
    kept.sort();
    kept
}

impl UpUnit {
    /// Name of the unit, without its ending.
    fn name(&self) -> String {
        let short: String = if self.model.is_empty() { String::new() } else { name_of_model(&self.model) };
        let letters: String =
            short.chars().map(|letter| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '-' }).collect();
        if letters.is_empty() { "hostler-up".to_owned() } else { format!("hostler-up-{letters}") }
    }

    fn text(&self) -> String {
        let Self { model, command, environment, folder, leave } = self;
        let what = if model.is_empty() { "a simulated engine".to_owned() } else { model.replace('%', "%%") };
        format!(
            "# Written by `hostler up --service`; written anew, it has the words of that command.\n\
             [Unit]\nDescription=Hostler serves {what}\n\n\
             [Service]\nWorkingDirectory={}\nEnvironment={}\nExecStart={}\n\
             # A wrong command line does not mend itself.\n\
             Restart=on-failure\nRestartSec=30\nRestartPreventExitStatus=2\n\
             # Running requests may finish; then the engines stop.\n\
             KillMode=mixed\nTimeoutStopSec={}\n\
             # An engine that the kernel kills for want of memory is started again.\n\
             OOMPolicy=continue\nLimitNOFILE=65536\nNoNewPrivileges=yes\n\n\
             [Install]\nWantedBy=default.target\n",
            folder.replace('%', "%%"),
            quote_assignments(environment),
            quote_command(command),
            leave.as_secs(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(model: &str) -> UpUnit {
        UpUnit {
            model: model.to_owned(),
            command: vec!["/opt/a b/hostler".into(), "up".into(), model.into()],
            environment: vec!["PATH=/usr/bin".into()],
            folder: "/home/100%".into(),
            leave: Duration::from_secs(90),
        }
    }

    #[test]
    fn the_unit_runs_the_same_command_without_the_flag() {
        let given = ["--config", "f", "up", "tiny", "--service", "--tp", "2", "--", "--service"].map(OsString::from);
        assert_eq!(words(given.into_iter()).unwrap(), ["--config", "f", "up", "tiny", "--tp", "2", "--", "--service"]);
        assert!(words([OsString::from("a\nExecStart=b")].into_iter()).is_err());
        let text = unit("org/tiny").text();
        assert!(text.contains("ExecStart=\"/opt/a b/hostler\" \"up\" \"org/tiny\"\n"), "{text}");
        assert!(text.contains("WorkingDirectory=/home/100%%\n") && text.contains("TimeoutStopSec=90\n"), "{text}");
    }

    #[test]
    fn a_unit_is_named_after_its_model() {
        for (model, name) in [("org/Tiny-1.5B", "hostler-up-Tiny-1.5B"), ("", "hostler-up"), ("a:b", "hostler-up-a-b")] {
            assert_eq!(unit(model).name(), name);
        }
    }

    #[test]
    fn no_secret_comes_into_a_unit() {
        let variables = [("PATH", "/bin"), ("HF_TOKEN", "hf_x"), ("HOSTLER_ADMIN_KEY", "hk_x"), ("HOSTLER_MODEL", "m"), ("HOME", "/h")];
        let kept = kept_environment(variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(kept, ["HOSTLER_MODEL=m", "PATH=/bin"]);
    }
}
