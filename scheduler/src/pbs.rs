//! PBS: the command line of `qsub`, and parsers for the output of `qstat`. Pure; times are those of
//! `TZ=UTC`.

mod hosts;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};

pub(crate) use self::hosts::find_obstacle;
use crate::{JobReading, JobState, RenderedSubmission, RunTime, ScheduledJob, Submission, format_walltime, shell};

/// Messages of `qdel` and `qstat` for jobs that have ended, are ending or never existed, and for a
/// part that has ended before its array.
pub(crate) const GONE: [&str; 4] =
    ["Unknown Job Id", "Job has finished", "Request invalid for finished array subjob", "Request invalid for state of job"];

/// Arguments that make `qstat` print a job's attributes, separated by a character that no value
/// contains. PBS writes control characters in another way (`^A`).
///
/// `-F json` is no alternative. In 23.06 its output is unreadable if a word of the job contains a
/// backslash or a letter beyond ASCII, or is `nan`. A job's words include the command line of
/// `qsub`, and the folder and variables of the submitter.
pub(crate) const FORMAT: [&str; 5] = ["-f", "-F", "dsv", "-D", SEPARATOR];

const SEPARATOR: &str = "\u{1}";

/// Arguments of `pbsnodes` for all hosts, in the same format.
pub(crate) const HOSTS: [&str; 5] = ["-a", "-F", "dsv", "-D", SEPARATOR];

const HEAD: &str = "Job Id: ";

/// Start of an array's comment once its first part has started. Waiting parts have their array's
/// comment.
const ARRAY_BEGAN: &str = "Job Array Began at";

/// Bytes of the hash in a script's name: enough that no two scripts of a fleet ever share one.
const DIGEST_BYTES: usize = 8;

/// Renders the command line of `qsub`, and the script.
///
/// The job's top process follows the two dashes. Signals reach it, and SIGTERM does not end it at
/// once. The login shell becomes the program by `exec`.
///
/// Everybody can read the arguments with `ps` and `qstat -f`, so the shell's lines are in a file.
pub(crate) fn render(submission: &Submission) -> RenderedSubmission {
    // Without `-f`, qsub leaves a process of its own for a minute, with all files that it inherits.
    let mut arguments: Vec<String> = vec!["-f".into(), "-N".into(), submission.name.clone()];
    if submission.parts > 1 {
        arguments.extend(["-J".into(), format!("1-{}", submission.parts)]);
    }
    // A job that was preempted or whose host died is run again under its id.
    arguments.extend(["-r", "y", "-j", "oe", "-o"].map(str::to_owned));
    arguments.push(format!("{}/", submission.log_dir.display().to_string().trim_end_matches('/')));
    if submission.hosts > 1 {
        arguments.extend(["-l".into(), format!("select={}", chunks(submission.hosts, &submission.resources))]);
        arguments.extend(["-l".into(), "place=scatter:excl".into()]);
    } else if !submission.resources.is_empty() {
        arguments.extend(["-l".into(), format!("select={}", submission.resources)]);
    }
    arguments.extend(["-l".into(), format!("walltime={}", format_walltime(submission.walltime))]);
    for (flag, value) in [("-A", &submission.account), ("-q", &submission.queue)] {
        if !value.is_empty() {
            arguments.extend([flag.to_owned(), value.clone()]);
        }
    }
    if let Some(job) = &submission.after {
        arguments.extend(["-W".to_owned(), format!("depend=afterany:{job}")]);
    }
    arguments.extend_from_slice(&submission.options);
    let mut setup = submission.setup.clone();
    if submission.hosts > 1 {
        setup.push(START_ON_OTHER_HOSTS.to_owned());
    }
    let script = shell::login_script(&setup, &format!("exec {}", shell::quote(&submission.program)));
    let digest: String = Sha256::digest(&script).iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect();
    let file = submission.script_dir.join(format!("{digest}.sh"));
    arguments.extend(["--", "/bin/bash", "-l"].map(str::to_owned));
    arguments.push(file.display().to_string());
    RenderedSubmission { program: "qsub", arguments, script, script_file: Some(file) }
}

/// So many chunks of these resources, which say one: `1:ncpus=16` or `ncpus=16`.
fn chunks(hosts: u32, resources: &str) -> String {
    match resources.split_once(':') {
        _ if resources.is_empty() => hosts.to_string(),
        Some((count, rest)) if count.bytes().all(|byte| byte.is_ascii_digit()) => format!("{hosts}:{rest}"),
        _ if resources.bytes().all(|byte| byte.is_ascii_digit()) => hosts.to_string(),
        _ => format!("{hosts}:{resources}"),
    }
}

/// Lines that run this script on the job's other hosts too, where it has an argument.
///
/// The job's script runs on its first host alone. `pbsdsh -n` counts the lines of `PBS_NODEFILE`,
/// where a host has one for each of its `mpiprocs`. Its tasks lack five variables that the script
/// has on the first host (`OpenPBS` 23.06).
///
/// Nobody starts a task again, so the end of one ends the job: `$$` becomes the program. `pbsdsh`
/// passes SIGTERM on to its task.
const START_ON_OTHER_HOSTS: &str = r#"if [ -z "${1:-}" ]; then
    awk '!seen[$0]++ && NR > 1 { print NR - 1, $0 }' "$PBS_NODEFILE" | while read -r line host; do
        {
            pbsdsh -n "$line" -- /usr/bin/env USER="$USER" LOGNAME="$LOGNAME" SHELL="$SHELL" \
                ${PBS_ARRAY_ID:+"PBS_ARRAY_ID=$PBS_ARRAY_ID" "PBS_ARRAY_INDEX=$PBS_ARRAY_INDEX"} \
                /bin/bash -l "$0" "$host" || true
            echo "the agent on $host has ended, and this job with it" >&2
            kill $$
        } &
    done
fi"#;

/// The chunk that a submission selects; `None` for the server's default.
pub(crate) fn chunk(submission: &Submission) -> Option<&str> {
    let selected = submission.options.iter().find_map(|word| word.strip_prefix("select="));
    selected.or(Some(submission.resources.as_str()).filter(|chunk| !chunk.is_empty()))
}

/// Splits ids into calls of `qdel`. The server of `OpenPBS` 23.06 dies of a call with a part of an
/// array beside other jobs, and its `qdel` leaves out some of several parts.
pub(crate) fn split_for_qdel(ids: &[String]) -> Vec<Vec<String>> {
    let (parts, others): (Vec<String>, Vec<String>) = ids.iter().cloned().partition(|id| is_part(id));
    let calls = parts.into_iter().map(|part| vec![part]).chain([others]);
    calls.filter(|ids| !ids.is_empty()).collect()
}

/// Parses the output of `qstat` for one job in this format.
pub(crate) fn read_job(text: &str, id: &str, now: SystemTime) -> Result<JobReading, &'static str> {
    let jobs = parse(text)?;
    // The id may contain another form of the server's name.
    let only = || jobs.first().filter(|_| jobs.len() == 1);
    let job = jobs.iter().find(|job| job.id == id).or_else(only).ok_or("other jobs")?;
    let ends_at = match read_run_time(job)? {
        Some(run_time) => run_time.end(job.get("stime").and_then(parse_time).ok_or("no start time of the job")?, now),
        None => None,
    };
    let run = job.get("run_count").and_then(|count| count.trim().parse().ok()).filter(|count| *count > 0);
    let time = |name| job.get(name).and_then(parse_time);
    let queued = time("ctime").zip(time("stime")).and_then(|(submitted, started)| started.duration_since(submitted).ok());
    Ok(JobReading { run, ends_at, queued })
}

/// Parses the output of `qstat -E -t ID…` in this format, with the ids of arrays among them.
pub(crate) fn read_jobs(text: &str) -> Result<Vec<ScheduledJob>, &'static str> {
    let jobs = parse(text)?;
    // An array itself is listed too, before its parts.
    let (arrays, parts): (Vec<_>, Vec<_>) = jobs.iter().partition(|job| job.id.contains("[]"));
    let arrays: BTreeMap<&str, &PrintedJob<'_>> = arrays.into_iter().map(|array| (number(array.id), array)).collect();
    let read = |job: &PrintedJob<'_>| {
        let array = arrays.get(number(job.id)).filter(|_| is_part(job.id)).copied();
        read_state(job).transpose().map(|state| Ok(read_scheduled(job, array, state?)))
    };
    parts.into_iter().filter_map(read).collect()
}

/// Parses the name of the default server from `qstat -B -f`, which prints `Server: head` and then
/// its settings.
pub(crate) fn read_server(text: &str) -> Result<String, &'static str> {
    let name = text.lines().find_map(|line| line.trim().strip_prefix("Server:")).map(str::trim).filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or("no server")
}

/// A job as `qstat` prints it.
struct PrintedJob<'a> {
    id: &'a str,
    /// Attributes by name. Resources have their list's name as a prefix, as in
    /// `Resource_List.walltime`.
    attributes: BTreeMap<&'a str, &'a str>,
}

impl<'a> PrintedJob<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.attributes.get(name).copied()
    }
}

fn parse(text: &str) -> Result<Vec<PrintedJob<'_>>, &'static str> {
    let jobs = text.trim_start().strip_prefix(HEAD).ok_or("no job")?;
    // Tolerate the rare line break within a value.
    let jobs = jobs.split("\nJob Id: ").map(|job| {
        let (id, attributes) = job.trim_end().split_once(SEPARATOR).ok_or("a job without attributes")?;
        Ok(PrintedJob { id, attributes: attributes.split(SEPARATOR).filter_map(|attribute| attribute.split_once('=')).collect() })
    });
    jobs.collect()
}

/// Job number: `12` of `12.head`, `12[].head` and `12[3].head`.
fn number(id: &str) -> &str {
    id.split(['[', '.']).next().unwrap_or_default()
}

fn is_part(id: &str) -> bool {
    id.contains('[') && !id.contains("[]")
}

/// State of a job; `None` if it has ended or was moved to another server.
fn read_state(job: &PrintedJob<'_>) -> Result<Option<JobState>, &'static str> {
    let is_held = || job.get("Hold_Types").is_some_and(|holds| holds != "n");
    Ok(Some(match job.get("job_state").ok_or("a job without a state")? {
        // The parts of a held array are queued.
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

fn read_scheduled(job: &PrintedJob<'_>, array: Option<&PrintedJob<'_>>, state: JobState) -> ScheduledJob {
    let time = |name: &str| job.get(name).and_then(parse_time);
    // A waiting part repeats what is known of its array, and a job that is run again may repeat
    // data of its last run.
    let has_started = state.has_started();
    // PBS estimates when an array's next part starts, and reports that only for the array.
    let estimated = || array.and_then(|array| array.get("estimated.start_time")).and_then(parse_time);
    ScheduledJob {
        id: job.id.to_owned(),
        state,
        comment: job.get("comment").filter(|comment| has_started || !comment.starts_with(ARRAY_BEGAN)).unwrap_or_default().to_owned(),
        submitted: time("ctime"),
        started: time("stime").filter(|_| has_started),
        run_time: read_run_time(job).unwrap_or_default().filter(|_| has_started),
        estimated_start: time("estimated.start_time").or_else(estimated).filter(|_| !has_started),
        // `x3001/0*64`, and `+` before each further host.
        host: job.get("exec_host").and_then(|hosts| hosts.split(['/', '+']).next()).filter(|_| has_started).unwrap_or_default().to_owned(),
    }
}

/// How long a job may run; `None` if it has no walltime. The used time of a run that has just begun
/// is unknown.
fn read_run_time(job: &PrintedJob<'_>) -> Result<Option<RunTime>, &'static str> {
    let Some(walltime) = job.get("Resource_List.walltime") else { return Ok(None) };
    let limit = parse_walltime(walltime).ok_or("a walltime that is none")?;
    let used = job.get("resources_used.walltime").and_then(parse_walltime);
    Ok(Some(RunTime { limit, used }))
}

/// `Mon Nov 23 12:00:00 2026`, or seconds since 1970.
fn parse_time(value: &str) -> Option<SystemTime> {
    if let Ok(seconds) = value.trim().parse() {
        return UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    }
    // HTTP's date formats include that of `ctime`.
    httpdate::parse_http_date(value.trim()).ok()
}

/// `HH:MM:SS`, where the hours may have more digits and the seconds a fraction, `MM:SS`, or
/// seconds.
fn parse_walltime(value: &str) -> Option<Duration> {
    let seconds = value.trim().split(':').try_fold(0.0, |sum, part| {
        let part: f64 = part.parse().ok().filter(|part: &f64| part.is_finite() && *part >= 0.0)?;
        Some(sum * 60.0 + part)
    });
    Duration::try_from_secs_f64(seconds?).ok()
}

#[cfg(test)]
mod tests;
