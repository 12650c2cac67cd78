//! Restarts the fleet's controller after its host has restarted, or somebody has killed it: a timer
//! of the user's systemd, or a line of the user's crontab.
//!
//! `hostler init --service` makes it, and `hostler doctor` looks for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use hostler_boot::program::run_to_end;
use hostler_controller::FleetFolder;
use tokio::process::Command;

use crate::output::say;

/// How long systemd or cron may take to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Service that restarts the controller on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControllerService {
    /// A timer of the user's systemd.
    Timer {
        /// Whether that systemd runs while the user is not logged in.
        lingers: bool,
    },
    Crontab,
}

/// Finds the service that restarts the controller of this folder's fleet.
pub(crate) async fn find_service(folder: &FleetFolder) -> Option<ControllerService> {
    let name = folder.controller_job_name();
    if units().is_some_and(|units| units.join(format!("{name}.timer")).exists()) {
        return Some(ControllerService::Timer { lingers: is_lingering().await });
    }
    let table = ask("crontab", &["-l"], "").await.unwrap_or_default();
    table.lines().any(|line| is_line_of(line, &name)).then_some(ControllerService::Crontab)
}

/// Makes a service that restarts the controller, and says what it made.
///
/// # Errors
/// When this host has neither a systemd of the user's nor cron, or one of them refuses.
pub(crate) async fn make_service(folder: &FleetFolder, config: &Path) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let words = ["controller", "--ensure", "--config"].map(str::to_owned);
    let command: Vec<String> = std::iter::once(program.display().to_string()).chain(words).chain([config.display().to_string()]).collect();
    let environment = kept_environment(|name| std::env::var(name).ok());
    let name = folder.controller_job_name();
    if ask("systemctl", &["--user", "show-environment"], "").await.is_ok() {
        return make_timer(&name, &command, &environment).await;
    }
    let table = match ask("crontab", &["-l"], "").await {
        Ok(table) => table,
        // crontab fails for a user who has no table yet.
        Err(error) if error.to_string().contains("no crontab") => String::new(),
        Err(error) => bail!(
            "neither systemd nor cron starts programs of yours on this host: {error:#}; ask the site's support, or set cluster.controller = \"job\""
        ),
    };
    ask("crontab", &["-"], &with_line(&table, &name, &command, &environment)?).await?;
    say(&format!(
        "service     made   a line of your crontab starts the controller again within five minutes (`crontab -e` removes it: {name})"
    ));
    Ok(())
}

async fn make_timer(name: &str, command: &[String], environment: &[String]) -> anyhow::Result<()> {
    let units = units().context("there is no home folder to keep a unit of systemd in")?;
    fs::create_dir_all(&units).with_context(|| format!("cannot make {}", units.display()))?;
    for (file, text) in [(format!("{name}.service"), service_unit(command, environment)), (format!("{name}.timer"), TIMER_UNIT.to_owned())]
    {
        let file = units.join(file);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    ask("systemctl", &["--user", "daemon-reload"], "").await?;
    ask("systemctl", &["--user", "enable", "--now", &format!("{name}.timer")], "").await?;
    say(&format!(
        "service     made   a timer of your systemd starts the controller again within five minutes (`systemctl --user disable --now {name}.timer` ends it)"
    ));
    let _ = ask("loginctl", &["enable-linger"], "").await;
    if !is_lingering().await {
        say("service     note   this host ends your systemd when you log out: ask the site's support for `loginctl enable-linger`");
    }
    Ok(())
}

/// Variables by which the controller finds the scheduler's commands and the fleet's folder. Systemd
/// and cron have their own values.
fn kept_environment(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let names = ["PATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME"];
    names.into_iter().filter_map(|name| Some(format!("{name}={}", variable(name)?))).collect()
}

/// Unit that starts the controller, which outlives the starting command.
fn service_unit(command: &[String], environment: &[String]) -> String {
    format!(
        "[Unit]\nDescription=Starts the controller of a Hostler fleet where one is wanted and none runs\n\n\
         [Service]\nType=oneshot\nKillMode=process\nEnvironment={}\nExecStart={}\n",
        quote_assignments(environment),
        quote_command(command)
    )
}

const TIMER_UNIT: &str = "[Unit]\nDescription=Looks every five minutes whether a Hostler fleet has its controller\n\n\
                          [Timer]\nOnStartupSec=30s\nOnUnitInactiveSec=5min\n\n[Install]\nWantedBy=timers.target\n";

/// Words of a unit's command, quoted: systemd expands `%` and `$`, and reads escapes.
pub(crate) fn quote_command(words: &[String]) -> String {
    quote_assignments(words).replace('$', "$$")
}

/// Assignments of a unit's environment, quoted. A `$` there is itself (systemd.exec(5)).
pub(crate) fn quote_assignments(words: &[String]) -> String {
    let quote = |word: &String| format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%"));
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

/// The table with one line for this fleet, in the place of an earlier one.
fn with_line(table: &str, name: &str, command: &[String], environment: &[String]) -> anyhow::Result<String> {
    let words = ["env"].into_iter().chain(environment.iter().chain(command).map(String::as_str));
    let command = shlex::try_join(words).context("a path of this program's cannot be written in a crontab")?;
    let mut lines: Vec<String> = table.lines().filter(|line| !is_line_of(line, name)).map(str::to_owned).collect();
    // cron takes a bare `%` for the end of the command.
    lines.push(format!("*/5 * * * * {} >/dev/null 2>&1 # {name}", command.replace('%', "\\%")));
    Ok(lines.join("\n") + "\n")
}

fn is_line_of(line: &str, name: &str) -> bool {
    line.rsplit_once('#').is_some_and(|(_, comment)| comment.trim() == name)
}

/// Folder of the user's systemd units.
pub(crate) fn units() -> Option<PathBuf> {
    Some(hostler_boot::home::config_dir()?.join("systemd/user"))
}

async fn is_lingering() -> bool {
    ask("loginctl", &["show-user", "--property=Linger", "--value"], "").await.is_ok_and(|answer| answer.trim() == "yes")
}

/// Runs a program of the host, and returns its output.
async fn ask(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    let ended = run_to_end(command, input.as_bytes(), ASK_TIMEOUT).await.with_context(|| format!("cannot run {program}"))?;
    let output = ended.with_context(|| format!("{program} did not end within {} s", ASK_TIMEOUT.as_secs()))?;
    if !output.status.success() {
        bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_crontab_has_one_line_for_each_fleet() {
        let command = words(&["/home/a b/hostler", "controller", "--ensure", "--config", "/home/a%b/hostler.toml"]);
        let environment = kept_environment(|name| (name == "PATH").then(|| "/usr/bin:/opt/slurm/bin".to_owned()));
        let table = "MAILTO=me\n*/5 * * * * old >/dev/null 2>&1 # hostler_controller-ab12\n0 1 * * * other # hostler_controller-zz99\n";
        let changed = with_line(table, "hostler_controller-ab12", &command, &environment).unwrap();
        assert_eq!(
            changed,
            "MAILTO=me\n0 1 * * * other # hostler_controller-zz99\n*/5 * * * * env 'PATH=/usr/bin:/opt/slurm/bin' '/home/a b/hostler' controller \
             --ensure --config '/home/a\\%b/hostler.toml' >/dev/null 2>&1 # hostler_controller-ab12\n"
        );
        assert_eq!(with_line(&changed, "hostler_controller-ab12", &command, &environment).unwrap(), changed);
    }

    #[test]
    fn a_unit_keeps_its_words_as_they_are() {
        let unit = service_unit(&words(&["/home/100%/hostler", "controller", "a \"$b\""]), &words(&["PATH=/usr/bin"]));
        assert!(unit.contains("ExecStart=\"/home/100%%/hostler\" \"controller\" \"a \\\"$$b\\\"\"\n"), "{unit}");
        assert!(unit.contains("KillMode=process\nEnvironment=\"PATH=/usr/bin\"\n"), "{unit}");
    }
}
