//! Slurm: the command line and script of `sbatch`, and parsers for the output of `squeue` and
//! `scontrol`. Pure; times are those of `SLURM_TIME_FORMAT=%s`, seconds since 1970.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::{JobReading, JobState, RenderedSubmission, RunTime, ScheduledJob, Submission, format_walltime, shell};

/// Messages of `scancel` for jobs that have ended.
pub(crate) const GONE: [&str; 2] = ["Invalid job id specified", "already completing or completed"];

/// The most seconds that `--signal` takes.
const MAX_SIGNAL_LEAD: u64 = 65_535;

/// Variables that a job gets from the submitting environment: enough for a login shell, and nothing
/// secret. By default `sbatch` copies all of them. The meaning of `NONE` and `NIL` differs between
/// releases; a list of names is the same in all.
const EXPORTED: &str = "--export=HOME,LOGNAME,PATH,SHELL,USER";

/// Fields of `squeue`, as `read_jobs` parses them: id, state, priority, submission, actual or
/// expected start, end, host and reason. The last field may hold anything.
const FIELDS: &str = "%i|%T|%Q|%V|%S|%e|%N|%r";

/// Fields of one job: its end, submission and start.
pub(crate) const JOB_FIELDS: &str = "%e|%V|%S";

/// Renders the command line and script of `sbatch`. Slurm keeps the script for the job's owner and
/// operators. `srun` starts the program, because it passes signals and the exit code on.
pub(crate) fn render(submission: &Submission) -> RenderedSubmission {
    let mut arguments = vec!["--parsable".to_owned(), format!("--job-name={}", submission.name)];
    if submission.parts > 1 {
        arguments.push(format!("--array=1-{}", submission.parts));
    }
    // A job that was preempted or whose host died is run again under its id, and its output is
    // kept.
    arguments.extend(match submission.hosts {
        0 | 1 => vec!["--nodes=1".to_owned(), "--ntasks=1".to_owned()],
        hosts => vec![format!("--nodes={hosts}"), "--ntasks-per-node=1".to_owned(), "--exclusive".to_owned()],
    });
    arguments.extend(["--requeue", "--open-mode=append", EXPORTED].map(str::to_owned));
    arguments.push(format!("--time={}", format_walltime(submission.walltime)));
    let lead = submission.drain_lead.as_secs().min(MAX_SIGNAL_LEAD);
    if lead > 0 {
        arguments.push(format!("--signal=USR1@{lead}"));
    }
    let folder = submission.log_dir.display().to_string().replace('%', "%%");
    let file = if submission.parts > 1 { "%x-%A_%a.log" } else { "%x-%j.log" };
    arguments.push(format!("--output={}/{file}", folder.trim_end_matches('/')));
    for (flag, value) in [("--account", &submission.account), ("--partition", &submission.queue)] {
        if !value.is_empty() {
            arguments.push(format!("{flag}={value}"));
        }
    }
    arguments.extend(submission.after.iter().map(|job| format!("--dependency=afterany:{job}")));
    arguments.extend(submission.resources.split_whitespace().map(str::to_owned));
    arguments.extend_from_slice(&submission.options);
    RenderedSubmission { program: "sbatch", arguments, script: render_script(submission), script_file: None }
}

/// Reason that `sbatch --test-only` gives for a job that no node could run, without its prefix.
pub(crate) fn read_obstacle(words: &str) -> &str {
    words.trim_start_matches("sbatch: error: ").trim_start_matches("allocation failure: ")
}

fn render_script(submission: &Submission) -> String {
    // By default `srun` would export what `sbatch` was told to. Since 22.05 it does not inherit
    // `--cpus-per-task`.
    let mut step = "srun --export=ALL ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}".to_owned();
    if submission.hosts > 1 {
        // Nobody starts a task again. By default `srun` waits for the others until the time limit.
        step.push_str(" --kill-on-bad-exit=1");
    }
    shell::login_script(&submission.setup, &format!("{step} {}", shell::quote(&submission.program)))
}

/// Arguments of `squeue` for this user's jobs of a name: parts of arrays one by one, in all
/// partitions.
pub(crate) fn list_arguments(name: &str) -> [&str; 8] {
    ["--noheader", "--array", "--all", "--me", "--name", name, "--format", FIELDS]
}

/// Parses the output of `squeue` for `list_arguments`.
pub(crate) fn read_jobs(text: &str) -> Result<Vec<ScheduledJob>, &'static str> {
    text.lines().filter(|line| !line.trim().is_empty()).filter_map(|line| read_line(line).transpose()).collect()
}

/// Parses a job of `squeue`; `None` if it has ended.
fn read_line(line: &str) -> Result<Option<ScheduledJob>, &'static str> {
    let fields: Vec<&str> = line.trim().splitn(8, '|').collect();
    let [id, state, priority, submitted, start, end, host, reason] = fields[..] else { return Err("a job without all its fields") };
    let Some(state) = read_state(state, priority)? else { return Ok(None) };
    let has_started = state.has_started();
    let (start, end) = (read_time(start)?, read_time(end)?);
    let limit = end.zip(start).and_then(|(end, start)| end.duration_since(start).ok());
    Ok(Some(ScheduledJob {
        id: id.to_owned(),
        state,
        comment: if reason == "None" { String::new() } else { reason.to_owned() },
        submitted: read_time(submitted)?,
        started: start.filter(|_| has_started),
        // The limit grows by the time for which a job was suspended.
        run_time: limit.filter(|_| has_started).map(|limit| RunTime { limit, used: None }),
        estimated_start: start.filter(|_| !has_started),
        host: host.to_owned(),
    }))
}

/// State of a job; `None` if it has ended.
fn read_state(state: &str, priority: &str) -> Result<Option<JobState>, &'static str> {
    Ok(Some(match state {
        // Slurm holds a job by this priority, whatever the reason: `JobHeldUser`,
        // `job requeued in held state`.
        "PENDING" if priority == "0" => JobState::Held,
        "REQUEUE_HOLD" | "RESV_DEL_HOLD" | "SPECIAL_EXIT" => JobState::Held,
        "PENDING" | "REQUEUED" | "REQUEUE_FED" => JobState::Queued,
        "CONFIGURING" | "POWER_UP_NODE" | "RUNNING" | "SIGNALING" | "RESIZING" => JobState::Running,
        "SUSPENDED" | "STOPPED" => JobState::Suspended,
        "COMPLETING" | "STAGE_OUT" => JobState::Ending,
        "BOOT_FAIL" | "CANCELLED" | "COMPLETED" | "DEADLINE" | "FAILED" | "LAUNCH_FAILED" | "NODE_FAIL" | "OUT_OF_MEMORY" | "PREEMPTED"
        | "RECONFIG_FAIL" | "REVOKED" | "TIMEOUT" => return Ok(None),
        _ => return Err("a job in an unknown state"),
    }))
}

/// Parses the output of `squeue -h -j ID -o` with `JOB_FIELDS`.
pub(crate) fn read_job(text: &str) -> Result<JobReading, &'static str> {
    let mut times = text.split_whitespace().next().ok_or("no job")?.split('|').map(read_time);
    let ends_at = times.next().ok_or("no job")??;
    let [submitted, started] = [times.next(), times.next()].map(|time| time.and_then(Result::ok).flatten());
    let queued = submitted.zip(started).and_then(|(submitted, started)| started.duration_since(submitted).ok());
    Ok(JobReading { run: None, ends_at, queued })
}

/// Parses the output of `scontrol show config`: `KillWait                = 30 sec`.
pub(crate) fn read_kill_wait(text: &str) -> Result<Duration, &'static str> {
    read_setting(text, "KillWait").and_then(|value| value.parse().ok()).map(Duration::from_secs).ok_or("no `KillWait`")
}

/// Parses the output of `scontrol show config`: `ClusterName             = perlmutter`.
pub(crate) fn read_cluster(text: &str) -> Result<String, &'static str> {
    read_setting(text, "ClusterName").filter(|name| *name != "(null)").map(str::to_owned).ok_or("no `ClusterName`")
}

/// First word of a Slurm setting.
fn read_setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, value) = text.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| key.trim() == name)?;
    value.split_whitespace().next()
}

/// Parses seconds since 1970; `None` for a word that stands for no time.
fn read_time(word: &str) -> Result<Option<SystemTime>, &'static str> {
    if ["N/A", "NONE", "UNLIMITED", "INVALID", "UNKNOWN"].iter().any(|none| word.eq_ignore_ascii_case(none)) {
        return Ok(None);
    }
    let seconds = word.parse().map_err(|_| "no time in seconds")?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).map(Some).ok_or("no time in seconds")
}

#[cfg(test)]
mod tests;
