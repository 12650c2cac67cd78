//! What Hostler knows of batch schedulers: how a job is submitted, listed, cancelled and asked for its end. The agent reads its own job's end,
//! the controller keeps jobs. `pbs` and `slurm` render command lines and read what is printed; they are pure. `command` runs programs.

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

/// Which scheduler runs jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheduler {
    Pbs,
    Slurm,
}

/// Which scheduler it is, from whatever host it is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerIdentity {
    pub kind: Scheduler,
    /// What it calls itself: of PBS the server, of Slurm the cluster. `None` where that is not known.
    pub name: Option<String>,
}

/// What is asked of a scheduler: a job of one host, or an array of such jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submission {
    /// The name of the job: letters, digits, `-`, `_` and `.`, a letter first. Jobs are found again by it.
    pub name: String,
    /// 1 is a plain job. More are an array with the indices 1 to `parts`.
    pub parts: u32,
    /// How long a part may run, in whole seconds; a fraction is rounded up.
    pub walltime: Duration,
    /// Whose time it is; empty where nothing is said.
    pub account: String,
    /// The queue, or the partition of Slurm; empty where nothing is said.
    pub queue: String,
    /// What a part gets. For PBS it is the chunk to select, such as `1:ncpus=16:ngpus=4`. For Slurm it is words for `sbatch`, such as
    /// `--gpus-per-node=4 --cpus-per-task=16`, which hold no blank themselves. Empty where nothing is said.
    pub resources: String,
    /// The job after whose end it may start, however that one ends; `None` where it waits for none.
    pub after: Option<String>,
    /// Further words for `qsub` or `sbatch`, unchanged, after all others.
    pub options: Vec<String>,
    /// The absolute path of the folder where the scheduler writes what a part prints, one file for each.
    pub log_dir: PathBuf,
    /// The absolute path of the folder where a job of PBS finds its script. It is the user's alone, and hosts of jobs have it too.
    pub script_dir: PathBuf,
    /// Lines for a login shell of bash, before the program. They may hold secrets, so no command line and no list of the scheduler has them.
    pub setup: Vec<String>,
    /// The program, by its absolute path, and its arguments.
    pub program: Vec<String>,
    /// How long before its end a part gets SIGUSR1 from Slurm; zero is never. PBS has no such signal.
    pub drain_lead: Duration,
}

/// Exactly what is submitted. As text it is commands for a shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedSubmission {
    pub program: &'static str,
    pub arguments: Vec<String>,
    /// What each part runs.
    pub script: String,
    /// The file, for its user alone, in which the script has to be before the program is run; `None` where it is the program's standard input.
    /// Its name follows from its content: jobs in the queue keep the script that they were submitted with.
    pub script_file: Option<PathBuf>,
}

/// A job that has not ended, or a part of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledJob {
    /// As the scheduler's own commands take it: `12.head`, `12[3].head`, `4711`, `4711_3`.
    pub id: String,
    pub state: JobState,
    /// Why it is in that state, in the scheduler's own words; empty where it has none.
    pub comment: String,
    /// By the scheduler's clock, as all times here. Another host's may differ by minutes: only what lies between two of them can be relied on.
    pub submitted: Option<SystemTime>,
    /// When its present run began.
    pub started: Option<SystemTime>,
    /// How long its present run may last; `None` where it has none, or no limit of time.
    pub run_time: Option<RunTime>,
    /// When it is expected to start, where the site computes that. It may have passed.
    pub estimated_start: Option<SystemTime>,
    /// Where it runs; empty where it does not.
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
    /// Its processes have ended or are being ended.
    Ending,
}

impl JobState {
    /// Whether it has a present run.
    #[must_use]
    pub fn has_started(self) -> bool {
        matches!(self, Self::Running | Self::Suspended | Self::Ending)
    }
}

/// What a scheduler says of a job's present run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobReading {
    /// Which run it is, counted from 1, where the command says so.
    pub run: Option<u32>,
    /// When it ends; `None` where it has no limit of time.
    pub ends: Option<SystemTime>,
}

/// Why it cannot be said which scheduler a host has.
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

    /// The word for people, scripts and settings.
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
    /// When the command is missing, fails, is late or prints what cannot be read.
    pub async fn identify(self) -> Result<SchedulerIdentity, CommandError> {
        let name = match self {
            Self::Pbs => run(Call::ask("qstat", ["-B", "-f"])).await?.read(pbs::read_server)?,
            Self::Slurm => run(Call::ask("scontrol", ["show", "config"])).await?.read(slurm::read_cluster)?,
        };
        Ok(SchedulerIdentity { kind: self, name: Some(name) })
    }

    /// What is to be submitted.
    #[must_use]
    pub fn render(self, submission: &Submission) -> RenderedSubmission {
        match self {
            Self::Pbs => pbs::render(submission),
            Self::Slurm => slurm::render(submission),
        }
    }

    /// Submits a job whose script is where it has to be, and returns its id: `12.head`, `12[].head` for an array, `4711`.
    ///
    /// # Errors
    /// When the command is missing, is refused, is late or prints no id. A job of a command that was late may exist all the same: `list` shows it.
    pub async fn submit(submission: RenderedSubmission) -> Result<String, CommandError> {
        let RenderedSubmission { program, arguments, script, script_file } = submission;
        let input = if script_file.is_none() { script } else { String::new() };
        run(Call::change(program, arguments).with_input(input)).await?.read(read_id)
    }

    /// Says why no node could ever run a job. `None` if one could, now or later, or where the scheduler does not tell. Nothing is submitted.
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

    /// This user's jobs of exactly that name that have not ended. The parts of an array are listed one by one, and the array itself is not.
    ///
    /// # Errors
    /// When a command is missing, fails, is late or prints what cannot be read. None of these is an empty list.
    pub async fn list(self, name: &str) -> Result<Vec<ScheduledJob>, CommandError> {
        match self {
            Self::Pbs => {
                let selected = run(Call::ask("qselect", ["-u", user().await?, "-N", name])).await?.text;
                if selected.trim().is_empty() {
                    return Ok(Vec::new());
                }
                // Only with `-E` are all jobs asked for at once: without it, releases after 23.06 print the first alone.
                let arguments = ["-E", "-t"].into_iter().chain(pbs::FORMAT).chain(selected.split_whitespace());
                let printed = run(Call::ask("qstat", arguments).tolerate(&pbs::GONE)).await?;
                if !printed.succeeded && printed.text.trim().is_empty() {
                    // All have ended meanwhile.
                    return Ok(Vec::new());
                }
                printed.read(pbs::read_jobs)
            }
            Self::Slurm => run(Call::ask("squeue", slurm::list_arguments(name))).await?.read(slurm::read_jobs),
        }
    }

    /// Ends jobs or parts. Those that are gone already are no error.
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
                // The others may be cancelled all the same.
                Err(error @ CommandError::Failed { .. }) => cancelled = cancelled.and(Err(error)),
                other => drop(other?),
            }
        }
        cancelled
    }

    /// Asks for the run and the end of a job that runs.
    ///
    /// # Errors
    /// When the command is missing, fails, is late or prints what cannot be read.
    pub async fn read_job(self, id: &str) -> Result<JobReading, CommandError> {
        match self {
            Self::Pbs => {
                let printed = run(Call::ask("qstat", pbs::FORMAT.into_iter().chain([id]))).await?;
                printed.read(|text| pbs::read_job(text, id, SystemTime::now()))
            }
            Self::Slurm => run(Call::ask("squeue", ["-h", "-j", id, "-o", "%e"])).await?.read(slurm::read_job),
        }
    }

    /// Asks how long after SIGTERM a job is killed; `None` for PBS, whose commands do not say it.
    ///
    /// # Errors
    /// When the command is missing, fails, is late or prints what cannot be read.
    pub async fn read_kill_wait(self) -> Result<Option<Duration>, CommandError> {
        match self {
            Self::Pbs => Ok(None),
            Self::Slurm => run(Call::ask("scontrol", ["show", "config"])).await?.read(slurm::read_kill_wait).map(Some),
        }
    }

    /// By which commands are there.
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
    /// Whether both may be the same scheduler. A name that is not known may be any.
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

/// The name of this process's user, which does not change.
async fn user() -> Result<&'static str, CommandError> {
    static USER: OnceCell<String> = OnceCell::const_new();
    let name = USER.get_or_try_init(async || Ok(run(Call::ask("id", ["-un"])).await?.text.trim().to_owned())).await?;
    Ok(name)
}

/// Whether two ids are of one job. PBS gives its server's name in several forms: `12.head` is `12.head.example.org`.
#[must_use]
pub fn is_same_job(one: &str, other: &str) -> bool {
    let number = |id: &str| id.split('.').next().unwrap_or_default().to_owned();
    one == other || (one.contains('.') && number(one) == number(other))
}

/// A server of PBS may call itself by its short name or by its full one: `head` is `head.example.org`.
fn is_same_host(one: &str, other: &str) -> bool {
    let (short, long) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    long.strip_prefix(short).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The id that `qsub` and `sbatch --parsable` print, last where a site's own words come before it. Slurm may add `;` and a cluster's name.
fn read_id(text: &str) -> Result<String, &'static str> {
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).ok_or("no id of a job")?;
    let id = line.split(';').next().unwrap_or_default();
    let is_id = id.starts_with(|first: char| first.is_ascii_digit()) && !id.contains(char::is_whitespace);
    if is_id { Ok(id.to_owned()) } else { Err("no id of a job") }
}

/// As `HH:MM:SS`, which both schedulers take; a fraction of a second is one more.
fn format_walltime(walltime: Duration) -> String {
    let seconds = walltime.as_secs() + u64::from(walltime.subsec_nanos() > 0);
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests;
