//! The schedulers' commands: called here and nowhere else, each with a deadline. What they print is read by pure functions.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tokio::process::Command;

use super::{Job, Scheduler};
use crate::host::find_program;
use crate::process::command::run_to_end;

/// Schedulers answer within a second unless they are overloaded.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// How old the walltime that PBS says is used may be: a host reports it every two minutes (`$max_check_poll`, 120 s by default), and on its way
/// it gets a little older.
const MAX_USED_AGE: Duration = Duration::from_secs(130);

/// Characters of a command's own words that are repeated.
const MAX_QUOTED_CHARS: usize = 200;

/// What a scheduler says of a job's present run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JobReading {
    /// Which run it is, where the command says so.
    pub(super) run: Option<u32>,
    /// When it ends; `None` where it has no limit of time.
    pub(super) ends: Option<SystemTime>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("there is no program `{program}`; looked for {searched}")]
    Missing { program: &'static str, searched: String },
    #[error("cannot run {}: {source}", program.display())]
    Run { program: PathBuf, source: std::io::Error },
    #[error("{} did not end within {} s and was killed", program.display(), COMMAND_TIMEOUT.as_secs())]
    Late { program: PathBuf },
    #[error("{} ended with {status}: {words}", program.display())]
    Failed { program: PathBuf, status: String, words: String },
    #[error("{} printed {what}: {words}", program.display())]
    Unreadable { program: PathBuf, what: &'static str, words: String },
}

/// Asks the job's scheduler for its run and its end.
pub(super) async fn read_job(job: &Job) -> Result<JobReading, CommandError> {
    match job.scheduler {
        Scheduler::Pbs => {
            let printed = run("qstat", &["-f", "-F", "json", &job.id]).await?;
            let reading = parse_qstat(&printed.text, &job.id, SystemTime::now());
            reading.map_err(|what| printed.unreadable(what))
        }
        Scheduler::Slurm => {
            let printed = run("squeue", &["-h", "-j", &job.id, "-o", "%e"]).await?;
            let ends = parse_squeue(&printed.text);
            ends.map(|ends| JobReading { run: None, ends }).map_err(|what| printed.unreadable(what))
        }
    }
}

/// Asks Slurm how long after SIGTERM it kills.
pub(super) async fn read_kill_wait() -> Result<Duration, CommandError> {
    let printed = run("scontrol", &["show", "config"]).await?;
    parse_kill_wait(&printed.text).ok_or_else(|| printed.unreadable("no `KillWait`"))
}

struct Printed {
    program: PathBuf,
    text: String,
}

impl Printed {
    fn unreadable(self, what: &'static str) -> CommandError {
        CommandError::Unreadable { program: self.program, what, words: quote(&self.text) }
    }
}

/// Runs a scheduler's command and returns what it printed.
async fn run(name: &'static str, arguments: &[&str]) -> Result<Printed, CommandError> {
    let found = find_program(Path::new(name), Some(&search_path(env::var_os("PATH"), pbs_folders())));
    let Some(program) = found.found else { return Err(CommandError::Missing { program: name, searched: found.searched }) };
    let mut command = Command::new(&program);
    // qstat prints local times without a zone, and squeue whatever is asked for.
    command.args(arguments).env("TZ", "UTC").env("SLURM_TIME_FORMAT", "%s");
    match run_to_end(command, COMMAND_TIMEOUT).await {
        Err(source) => Err(CommandError::Run { program, source }),
        Ok(None) => Err(CommandError::Late { program }),
        Ok(Some(Output { status, stdout, .. })) if status.success() => {
            Ok(Printed { program, text: String::from_utf8_lossy(&stdout).into_owned() })
        }
        Ok(Some(Output { status, stderr, .. })) => {
            Err(CommandError::Failed { program, status: status.to_string(), words: quote(&String::from_utf8_lossy(&stderr)) })
        }
    }
}

/// A command's own words, in one short line.
fn quote(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() { "nothing".to_owned() } else { line.chars().take(MAX_QUOTED_CHARS).collect() }
}

/// PATH, then where PBS is installed: the tasks that `pbsdsh` starts have `/bin:/usr/bin` alone.
fn search_path(path: Option<OsString>, more: Vec<PathBuf>) -> OsString {
    let path = path.unwrap_or_default();
    let folders = env::split_paths(&path).filter(|folder| folder.is_absolute()).chain(more);
    // Only a folder whose name has a colon cannot be joined.
    env::join_paths(folders).unwrap_or(path)
}

fn pbs_folders() -> Vec<PathBuf> {
    let file = env::var_os("PBS_CONF_FILE").unwrap_or_else(|| "/etc/pbs.conf".into());
    let configured = fs::read_to_string(file).ok().and_then(|text| parse_pbs_exec(&text));
    let installed = [env::var_os("PBS_EXEC").map(PathBuf::from), configured, Some("/opt/pbs".into())];
    installed.into_iter().flatten().map(|folder| folder.join("bin")).collect()
}

/// Where `/etc/pbs.conf` says that PBS is.
fn parse_pbs_exec(text: &str) -> Option<PathBuf> {
    let value = text.lines().find_map(|line| line.trim().strip_prefix("PBS_EXEC="))?;
    Some(PathBuf::from(value.trim())).filter(|path| path.is_absolute())
}

/// Reads what `qstat -f -F json ID` prints, with `TZ=UTC`. Times are in the form of `ctime`.
///
/// The job ends when it has run for its walltime. The time in which it was suspended does not count: the walltime that is used says so, as it
/// was at most `MAX_USED_AGE` ago. A job that was suspended for less than that ends later than is returned, and none ends earlier.
fn parse_qstat(text: &str, id: &str, now: SystemTime) -> Result<JobReading, &'static str> {
    let root: Value = serde_json::from_str(text).map_err(|_| "what is no JSON")?;
    let jobs = root.get("Jobs").and_then(Value::as_object).ok_or("no job")?;
    // Another form of the server's name may be in the id.
    let only = || jobs.values().next().filter(|_| jobs.len() == 1);
    let job = jobs.get(id).or_else(only).ok_or("other jobs")?;
    let run = job.get("run_count").and_then(parse_number).and_then(|count| u32::try_from(count).ok()).filter(|count| *count > 0);
    let Some(walltime) = job.get("Resource_List").and_then(|list| list.get("walltime")) else {
        return Ok(JobReading { run, ends: None });
    };
    let walltime = parse_walltime(walltime).ok_or("a walltime that is none")?;
    let started = job.get("stime").and_then(parse_time).ok_or("no start time of the job")?;
    let used = job.get("resources_used").and_then(|used| used.get("walltime")).and_then(parse_walltime);
    let by_use = used.and_then(|used| now.checked_add(walltime)?.checked_sub(used.saturating_add(MAX_USED_AGE)));
    Ok(JobReading { run, ends: started.checked_add(walltime).max(by_use) })
}

fn parse_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}

/// `Mon Nov 23 12:00:00 2026`, or seconds since 1970.
fn parse_time(value: &Value) -> Option<SystemTime> {
    if let Some(seconds) = parse_number(value) {
        return UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    }
    // One of the forms of HTTP's dates is that of `ctime`.
    httpdate::parse_http_date(value.as_str()?.trim()).ok()
}

/// `HH:MM:SS`, where the hours may have more digits and the seconds a fraction, `MM:SS`, or seconds.
fn parse_walltime(value: &Value) -> Option<Duration> {
    if let Some(seconds) = value.as_f64() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let seconds = value.as_str()?.trim().split(':').try_fold(0.0, |sum, part| {
        let part: f64 = part.parse().ok().filter(|part: &f64| part.is_finite() && *part >= 0.0)?;
        Some(sum * 60.0 + part)
    });
    Duration::try_from_secs_f64(seconds?).ok()
}

/// Reads what `squeue -h -j ID -o %e` prints with `SLURM_TIME_FORMAT=%s`: seconds since 1970, or a word where the job has no end.
fn parse_squeue(text: &str) -> Result<Option<SystemTime>, &'static str> {
    let word = text.split_whitespace().next().ok_or("no job")?;
    if ["N/A", "NONE", "UNLIMITED", "INVALID", "UNKNOWN"].iter().any(|none| word.eq_ignore_ascii_case(none)) {
        return Ok(None);
    }
    let seconds = word.parse().map_err(|_| "no time in seconds")?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).map(Some).ok_or("no time in seconds")
}

/// Reads what `scontrol show config` prints: `KillWait                = 30 sec`.
fn parse_kill_wait(text: &str) -> Option<Duration> {
    let value = text.lines().find_map(|line| line.split_once('=').filter(|(name, _)| name.trim() == "KillWait"))?.1;
    value.split_whitespace().next()?.parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests;
