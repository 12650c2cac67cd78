//! Interface to batch schedulers: submits, lists and cancels jobs, and reads when they end.
//!
//! The agent reads its own job's end; the controller keeps jobs. `pbs` and `slurm` render command
//! lines and parse output; they are pure. `command` runs programs.

mod command;
mod pbs;
mod run_time;
mod shell;
mod slurm;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

pub use command::CommandError;
use command::{Call, run};
pub use run_time::RunTime;

/// Kind of scheduler that runs jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheduler {
    Pbs,
    Slurm,
}

/// Identity of a scheduler, equal on every host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerIdentity {
    pub kind: Scheduler,
    /// The scheduler's own name: for PBS the server, for Slurm the cluster. `None` if unknown.
    pub name: Option<String>,
}

/// A job, or an array of jobs, to submit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// Name of the job: letters, digits, `-`, `_` and `.`, with a letter first. Jobs are found
    /// again by name.
    pub name: String,
    /// Number of parts: 1 is a plain job, more are an array with the indices 1 to `parts`.
    pub parts: u32,
    /// Hosts of each part, which it has for itself if there are several. The program runs once on
    /// each, and learns its number from the scheduler's own variable.
    pub hosts: u32,
    /// How long a part may run, in whole seconds; a fraction is rounded up.
    pub walltime: Duration,
    /// Account that is charged; empty for the default.
    pub account: String,
    /// The queue, or Slurm's partition; empty for the default.
    pub queue: String,
    /// Resources of each part. For PBS, the chunk to select, such as `1:ncpus=16:ngpus=4`. For
    /// Slurm, words for `sbatch` such as `--gpus-per-node=4 --cpus-per-task=16`, none of which
    /// contains a blank. Empty for the default.
    pub resources: String,
    /// Job after whose end this one may start, however that one ends; `None` if it waits for none.
    pub after: Option<String>,
    /// Further words for `qsub` or `sbatch`, unchanged, after all others.
    pub options: Vec<String>,
    /// Absolute path of the folder where the scheduler writes the output of each part to a file.
    pub log_dir: PathBuf,
    /// Absolute path of the folder where a PBS job finds its script. Only the user can access it,
    /// and the hosts of jobs have it too.
    pub script_dir: PathBuf,
    /// Setup lines for a login bash, before the program. They may hold secrets, so they appear in
    /// no command line and no scheduler list.
    pub setup: Vec<String>,
    /// Program by its absolute path, and its arguments.
    pub program: Vec<String>,
    /// Time before its end at which Slurm sends a part SIGUSR1; zero means never. PBS has no such
    /// signal.
    pub drain_lead: Duration,
}

/// Exactly what is submitted. As text, it is shell commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedSubmission {
    pub program: &'static str,
    pub arguments: Vec<String>,
    /// Script that each part runs.
    pub script: String,
    /// File for this user alone that must hold the script before the program runs; `None` if the
    /// script is the program's standard input.
    ///
    /// The file's name follows from its content: queued jobs keep the script with which they were
    /// submitted.
    pub script_file: Option<PathBuf>,
}

/// A job that has not ended, or a part of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledJob {
    /// Id, as the scheduler's own commands take it: `12.head`, `12[3].head`, `4711`, `4711_3`.
    pub id: String,
    pub state: JobState,
    /// The scheduler's own words for the reason of the state; empty if it has none.
    pub comment: String,
    /// Submission time by the scheduler's clock, like all times here. Other clocks may differ by
    /// minutes, so rely only on differences.
    pub submitted: Option<SystemTime>,
    /// When the present run began.
    pub started: Option<SystemTime>,
    /// How long the present run may last; `None` if there is no run, or no time limit.
    pub run_time: Option<RunTime>,
    /// When the job is expected to start, if the site computes that. The time may have passed.
    pub estimated_start: Option<SystemTime>,
    /// Host on which the job runs; empty if it does not run.
    pub host: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobState {
    /// Waits for its turn, or to be run again.
    Queued,
    /// Waits until somebody releases it.
    Held,
    Running,
    Suspended,
    /// The job's processes have ended or are being ended.
    Ending,
}

impl JobState {
    /// Whether the job has a present run.
    #[must_use]
    pub fn has_started(self) -> bool {
        matches!(self, Self::Running | Self::Suspended | Self::Ending)
    }
}

/// A scheduler's information about a job's present run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobReading {
    /// Number of the run, counted from 1, if the command reports it.
    pub run: Option<u32>,
    /// When the run ends; `None` if it has no time limit.
    pub ends_at: Option<SystemTime>,
    /// Time from the submission to the start, by the scheduler's clock, if the command reports it.
    pub queued: Option<Duration>,
}

/// Reason why a host's scheduler is unknown.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NoScheduler {
    #[error(
        "this host has the commands of no scheduler: neither `qsub` and `qstat` nor `sbatch` and `squeue` were found in PATH={searched}; run this where jobs are submitted, or load the scheduler's module first"
    )]
    Absent { searched: String },
    #[error("this host has the commands of PBS and of Slurm: name the scheduler that is meant, `pbs` or `slurm`")]
    Ambiguous,
}

/// A word that names no scheduler.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("there is no scheduler `{0}`: use `pbs` or `slurm`")]
pub struct UnknownScheduler(pub String);

impl Scheduler {
    /// The scheduler whose commands this host has.
    ///
    /// # Errors
    /// When it has neither's, or both.
    pub fn find() -> Result<Self, NoScheduler> {
        let has = |programs: [&str; 2]| programs.iter().all(|program| command::find(program).found.is_some());
        Self::choose(has(["qsub", "qstat"]), has(["sbatch", "squeue"]))
    }

    /// Word for people, scripts and settings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pbs => "pbs",
            Self::Slurm => "slurm",
        }
    }

    /// Asks the scheduler for its own name, because hosts may call one server by several.
    ///
    /// # Errors
    /// When the command is missing, fails, is late or prints unreadable output.
    pub async fn identify(self) -> Result<SchedulerIdentity, CommandError> {
        let name = match self {
            Self::Pbs => run(Call::ask("qstat", ["-B", "-f"])).await?.read(pbs::read_server)?,
            Self::Slurm => run(Call::ask("scontrol", ["show", "config"])).await?.read(slurm::read_cluster)?,
        };
        Ok(SchedulerIdentity { kind: self, name: Some(name) })
    }

    /// Renders a submission as a command line and a script.
    #[must_use]
    pub fn render(self, submission: &Submission) -> RenderedSubmission {
        match self {
            Self::Pbs => pbs::render(submission),
            Self::Slurm => slurm::render(submission),
        }
    }

    /// Submits a job whose script is in place, and returns its id: `12.head`, `12[].head` for an
    /// array, `4711`.
    ///
    /// # Errors
    /// When the command is missing, is refused, is late or prints no id. A late command may still
    /// have created a job: `list` shows it.
    pub async fn submit(submission: RenderedSubmission) -> Result<String, CommandError> {
        let RenderedSubmission { program, arguments, script, script_file } = submission;
        let input = if script_file.is_none() { script } else { String::new() };
        run(Call::change(program, arguments).with_input(input)).await?.read(read_id)
    }

    /// Says why no node could ever run a job.
    ///
    /// Returns `None` if a node could, now or later, or if the scheduler does not say. Nothing is
    /// submitted.
    ///
    /// # Errors
    /// When the command is missing, is late or cannot be run.
    pub async fn find_obstacle(self, submission: &Submission) -> Result<Option<String>, CommandError> {
        match self {
            Self::Pbs => {
                let Some(chunk) = pbs::chunk(submission) else { return Ok(None) };
                Ok(pbs::find_obstacle(chunk, &run(Call::ask("pbsnodes", pbs::HOSTS)).await?.text))
            }
            Self::Slurm => {
                let RenderedSubmission { program, mut arguments, script, .. } =
                    slurm::render(&Submission { parts: 1, ..submission.clone() });
                arguments.insert(0, "--test-only".to_owned());
                match run(Call::change(program, arguments).with_input(script)).await {
                    Ok(_) => Ok(None),
                    Err(CommandError::Failed { words, .. }) => Ok(Some(slurm::read_obstacle(&words).to_owned())),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Lists this user's jobs of exactly this name that have not ended. Parts of an array are
    /// listed one by one, without the array itself.
    ///
    /// # Errors
    /// When a command is missing, fails, is late or prints unreadable output. None of these counts
    /// as an empty list.
    pub async fn list(self, name: &str) -> Result<Vec<ScheduledJob>, CommandError> {
        match self {
            Self::Pbs => {
                let selected = run(Call::ask("qselect", ["-u", user().await?, "-N", name])).await?.text;
                if selected.trim().is_empty() {
                    return Ok(Vec::new());
                }
                // Only `-E` queries all jobs at once: without it, releases after 23.06 print the
                // first alone.
                let arguments = ["-E", "-t"].into_iter().chain(pbs::FORMAT).chain(selected.split_whitespace());
                let printed = run(Call::ask("qstat", arguments).tolerate(&pbs::GONE)).await?;
                if !printed.succeeded && printed.text.trim().is_empty() {
                    // All jobs have ended meanwhile.
                    return Ok(Vec::new());
                }
                printed.read(pbs::read_jobs)
            }
            Self::Slurm => run(Call::ask("squeue", slurm::list_arguments(name))).await?.read(slurm::read_jobs),
        }
    }

    /// Ends jobs or parts. Jobs that are already gone are no error.
    ///
    /// # Errors
    /// When the command is missing, fails or is late.
    pub async fn cancel(self, ids: &[String]) -> Result<(), CommandError> {
        if ids.is_empty() {
            return Ok(());
        }
        let calls = match self {
            Self::Pbs => pbs::split_for_qdel(ids).into_iter().map(|ids| Call::change("qdel", ids).tolerate(&pbs::GONE)).collect(),
            Self::Slurm => vec![Call::change("scancel", ids.to_vec()).tolerate(&slurm::GONE)],
        };
        let mut cancelled = Ok(());
        for call in calls {
            match run(call).await {
                // The other jobs may be cancelled all the same.
                Err(error @ CommandError::Failed { .. }) => cancelled = cancelled.and(Err(error)),
                other => drop(other?),
            }
        }
        cancelled
    }

    /// Reads the run and the end of a running job.
    ///
    /// # Errors
    /// When the command is missing, fails, is late or prints unreadable output.
    pub async fn read_job(self, id: &str) -> Result<JobReading, CommandError> {
        match self {
            Self::Pbs => {
                let printed = run(Call::ask("qstat", pbs::FORMAT.into_iter().chain([id]))).await?;
                printed.read(|text| pbs::read_job(text, id, SystemTime::now()))
            }
            Self::Slurm => run(Call::ask("squeue", ["-h", "-j", id, "-o", slurm::JOB_FIELDS])).await?.read(slurm::read_job),
        }
    }

    /// Reads how long after SIGTERM a job is killed; `None` for PBS, whose commands do not say.
    ///
    /// # Errors
    /// When the command is missing, fails, is late or prints unreadable output.
    pub async fn read_kill_wait(self) -> Result<Option<Duration>, CommandError> {
        match self {
            Self::Pbs => Ok(None),
            Self::Slurm => run(Call::ask("scontrol", ["show", "config"])).await?.read(slurm::read_kill_wait).map(Some),
        }
    }

    /// Chooses the scheduler by the commands on this host.
    fn choose(has_pbs: bool, has_slurm: bool) -> Result<Self, NoScheduler> {
        match (has_pbs, has_slurm) {
            (true, false) => Ok(Self::Pbs),
            (false, true) => Ok(Self::Slurm),
            (true, true) => Err(NoScheduler::Ambiguous),
            (false, false) => Err(NoScheduler::Absent { searched: command::search_path().display().to_string() }),
        }
    }
}

impl SchedulerIdentity {
    /// Whether both may be the same scheduler. An unknown name matches any.
    #[must_use]
    pub fn may_be(&self, other: &Self) -> bool {
        let is_same_name = match (&self.name, &other.name) {
            (Some(one), Some(other)) => is_same_host(one, other),
            _ => true,
        };
        self.kind == other.kind && is_same_name
    }
}

impl fmt::Display for SchedulerIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.kind.as_str())?;
        self.name.as_ref().map_or(Ok(()), |name| write!(formatter, " {name}"))
    }
}

impl FromStr for Scheduler {
    type Err = UnknownScheduler;

    fn from_str(word: &str) -> Result<Self, UnknownScheduler> {
        [Self::Pbs, Self::Slurm].into_iter().find(|known| known.as_str() == word).ok_or_else(|| UnknownScheduler(word.to_owned()))
    }
}

impl fmt::Display for RenderedSubmission {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (arguments, script) = (shell::quote(&self.arguments), shell::here_document(&self.script));
        let Some(file) = &self.script_file else { return write!(formatter, "{} {arguments}{script}", self.program) };
        let install = ["install", "-D", "-m", "600", "/dev/stdin"].map(str::to_owned).into_iter().chain([file.display().to_string()]);
        write!(formatter, "{}{script}\n{} {arguments}", shell::quote(&install.collect::<Vec<_>>()), self.program)
    }
}

/// Name of this process's user, which does not change.
async fn user() -> Result<&'static str, CommandError> {
    static USER: OnceCell<String> = OnceCell::const_new();
    let name = USER.get_or_try_init(async || Ok(run(Call::ask("id", ["-un"])).await?.text.trim().to_owned())).await?;
    Ok(name)
}

/// Whether two ids name one job. PBS gives its server's name in several forms: `12.head` is
/// `12.head.example.org`.
#[must_use]
pub fn is_same_job(one: &str, other: &str) -> bool {
    let number = |id: &str| id.split('.').next().unwrap_or_default().to_owned();
    one == other || (one.contains('.') && number(one) == number(other))
}

/// Whether two names are of one PBS server. A server may use its short name or its full one: `head`
/// is `head.example.org`.
fn is_same_host(one: &str, other: &str) -> bool {
    let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    long.strip_prefix(short).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Job id printed by `qsub` or `sbatch --parsable`, on the last line if a site prints its own text
/// before. Slurm may add `;` and a cluster's name.
fn read_id(text: &str) -> Result<String, &'static str> {
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).ok_or("no id of a job")?;
    let id = line.split(';').next().unwrap_or_default();
    let is_id = id.starts_with(|first: char| first.is_ascii_digit()) && !id.contains(char::is_whitespace);
    if is_id { Ok(id.to_owned()) } else { Err("no id of a job") }
}

/// Walltime as `HH:MM:SS`, which both schedulers take; a fraction of a second is rounded up.
fn format_walltime(walltime: Duration) -> String {
    let seconds = walltime.as_secs() + u64::from(walltime.subsec_nanos() > 0);
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests;
