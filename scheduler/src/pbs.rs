//! PBS: the command line of `qsub`, and what `qstat` prints as JSON. Pure; times are those of `TZ=UTC`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{JobReading, JobState, RenderedSubmission, RunTime, ScheduledJob, Submission, format_walltime, shell};

/// What `qdel` and `qstat` say of jobs that have ended or were never there, and of a part that has ended while its array has not.
pub(crate) const GONE: [&str; 3] = ["Unknown Job Id", "Job has finished", "Request invalid for finished array subjob"];

/// Of the hash in a script's name: no two scripts of a fleet ever have the same.
const DIGEST_BYTES: usize = 8;

/// The command line of `qsub`, and the script. After the two dashes comes the job's top process, which signals reach and which SIGTERM does not end at once. The
/// login shell becomes the program by `exec`.
///
/// Everybody may read the arguments, by `ps` and by `qstat -f`, so the shell's lines are in a file.
pub(crate) fn render(submission: &Submission) -> RenderedSubmission {
    let mut arguments: Vec<String> = vec!["-N".into(), submission.name.clone()];
    if submission.parts > 1 {
        arguments.extend(["-J".into(), format!("1-{}", submission.parts)]);
    }
    // A job that was preempted or whose host died is run again under its id.
    arguments.extend(["-r", "y", "-j", "oe", "-o"].map(str::to_owned));
    arguments.push(format!("{}/", submission.log_dir.display().to_string().trim_end_matches('/')));
    if !submission.resources.is_empty() {
        arguments.extend(["-l".into(), format!("select={}", submission.resources)]);
    }
    arguments.extend(["-l".into(), format!("walltime={}", format_walltime(submission.walltime))]);
    for (flag, value) in [("-A", &submission.account), ("-q", &submission.queue)] {
        if !value.is_empty() {
            arguments.extend([flag.to_owned(), value.clone()]);
        }
    }
    arguments.extend_from_slice(&submission.options);
    let script = shell::login_script(&submission.setup, &format!("exec {}", shell::quote(&submission.program)));
    let digest: String = Sha256::digest(&script).iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect();
    let file = submission.script_dir.join(format!("{digest}.sh"));
    arguments.extend(["--", "/bin/bash", "-l"].map(str::to_owned));
    arguments.push(file.display().to_string());
    RenderedSubmission { program: "qsub", arguments, script, script_file: Some(file) }
}

/// Reads what `qstat -f -F json ID` prints.
pub(crate) fn read_job(text: &str, id: &str, now: SystemTime) -> Result<JobReading, &'static str> {
    let root = parse(text)?;
    let jobs = root.get("Jobs").and_then(Value::as_object).ok_or("no job")?;
    // Another form of the server's name may be in the id.
    let only = || jobs.values().next().filter(|_| jobs.len() == 1);
    let job = jobs.get(id).or_else(only).ok_or("other jobs")?;
    let ends = match read_run_time(job)? {
        Some(run_time) => run_time.end(job.get("stime").and_then(parse_time).ok_or("no start time of the job")?, now),
        None => None,
    };
    let run = job.get("run_count").and_then(parse_number).and_then(|count| u32::try_from(count).ok()).filter(|count| *count > 0);
    Ok(JobReading { run, ends })
}

/// Reads what `qstat -E -t -f -F json ID…` prints, where the ids of arrays are among them. `Jobs` is absent where all have ended meanwhile.
pub(crate) fn read_jobs(text: &str) -> Result<Vec<ScheduledJob>, &'static str> {
    let root = parse(text)?;
    let Some(jobs) = root.get("Jobs") else { return Ok(Vec::new()) };
    let jobs = jobs.as_object().ok_or("jobs that are none")?;
    // An array is listed itself, too, before its parts.
    let parts = jobs.iter().filter(|(id, _)| !id.contains("[]"));
    parts.filter_map(|(id, job)| read_state(job).transpose().map(|state| Ok(read_scheduled(id, job, state?)))).collect()
}

/// Reads what `qstat -B -f` prints: `Server: head`, then what it is set to. The default server's name, as that one has it.
pub(crate) fn read_server(text: &str) -> Result<String, &'static str> {
    let name = text.lines().find_map(|line| line.trim().strip_prefix("Server:")).map(str::trim).filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or("no server")
}

fn parse(text: &str) -> Result<Value, &'static str> {
    serde_json::from_str(text).map_err(|_| "what is no JSON")
}

/// `None` of a job that has ended or was moved to another server.
fn read_state(job: &Value) -> Result<Option<JobState>, &'static str> {
    let is_held = || job.get("Hold_Types").and_then(Value::as_str).is_some_and(|holds| holds != "n");
    Ok(Some(match job.get("job_state").and_then(Value::as_str).ok_or("a job without a state")? {
        // Of an array that is held, the parts are queued.
        "Q" | "W" | "T" if is_held() => JobState::Held,
        "Q" | "W" | "T" => JobState::Queued,
        "H" => JobState::Held,
        "R" => JobState::Running,
        "S" | "U" => JobState::Suspended,
        "E" => JobState::Ending,
        "F" | "X" | "M" => return Ok(None),
        _ => return Err("a job in an unknown state"),
    }))
}

fn read_scheduled(id: &str, job: &Value, state: JobState) -> ScheduledJob {
    let time = |name: &str| job.get(name).and_then(parse_time);
    let word = |name: &str| job.get(name).and_then(Value::as_str).unwrap_or_default();
    // A part that waits has what is known of its array, and a job that is run again may have what was of its last run.
    let has_started = state.has_started();
    ScheduledJob {
        id: id.to_owned(),
        state,
        comment: word("comment").to_owned(),
        submitted: time("ctime"),
        started: time("stime").filter(|_| has_started),
        run_time: read_run_time(job).unwrap_or_default().filter(|_| has_started),
        estimated_start: job
            .get("estimated")
            .and_then(|estimated| estimated.get("start_time"))
            .and_then(parse_time)
            .filter(|_| !has_started),
        // `x3001/0*64`, and `+` before each further host.
        host: word("exec_host").split(['/', '+']).next().filter(|_| has_started).unwrap_or_default().to_owned(),
    }
}

/// How long a job may run; `None` where it has no walltime. What is used of it cannot be told of a run that has just begun.
fn read_run_time(job: &Value) -> Result<Option<RunTime>, &'static str> {
    let Some(walltime) = job.get("Resource_List").and_then(|list| list.get("walltime")) else { return Ok(None) };
    let limit = parse_walltime(walltime).ok_or("a walltime that is none")?;
    let used = job.get("resources_used").and_then(|used| used.get("walltime")).and_then(parse_walltime);
    Ok(Some(RunTime { limit, used }))
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

#[cfg(test)]
mod tests;
