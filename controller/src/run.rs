//! The controller's loop.
//!
//! Every few seconds it queries scheduler and router, lets `cluster` decide, writes its memory
//! down, carries the actions out, and informs the router and the status file.
//!
//! If scheduler or router do not answer, that is no reason to act: the entry skips the step. Only
//! one thing is done at a time, so no two submissions are ever on their way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use hostler_boot::Shutdown;
use hostler_cluster::{Action, Budget, BudgetLeft, FleetEntry, FleetSize, Memory, decide};
use hostler_proto::fleet::v1::fleet_client::FleetClient;
use hostler_proto::fleet::v1::{EntryUse, ExpectRequest, ExpectedModel, ListRequest, ListResponse, TargetRequest};
use hostler_scheduler::{RenderedSubmission, ScheduledJob, Scheduler, SchedulerIdentity};
use hostler_tls::{TlsError, TokenStore};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint as Target};

use crate::attention::{Attention, Scene, is_settled};
use crate::expectation::{announce, expect, use_of_nodes};
use crate::folder::{Endpoint, FleetFile, FleetFolder, FolderError, HEARTBEAT_INTERVAL, IDENTITY_KEPT_FOR};
use crate::join_token;
use crate::observation::{EntryView, find_node, model_names, observe};
use crate::own_job::OwnJob;
use crate::report::report;
use crate::setup::ControllerSetup;
use crate::status::{EntryStatus, FleetStatus};
use crate::step_error::{StepError, is_refusal};
use crate::submission::{JobProgram, build_submission, job_form};

/// Time between two steps. People who wait for a job query the scheduler as often.
const STEP_INTERVAL: Duration = Duration::from_secs(5);

/// How long the router may take to answer: an agent may take five seconds for an order.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of announcements, which count for 30 seconds. A step may take longer than that.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(10);

/// How often the join token is checked, besides at each submission, and job leftovers are removed.
const TOKEN_INTERVAL: Duration = Duration::from_secs(600);

/// How often a memory is written if nothing was decided. Shorter than the longest interval that a
/// memory accepts between two steps.
const MEMORY_INTERVAL: Duration = Duration::from_secs(30);

/// State of an entry between two steps.
#[derive(Debug)]
struct EntryRecord {
    memory: Memory,
    written: Option<Instant>,
    refusal: String,
    status: Option<EntryStatus>,
    expected: Option<ExpectedModel>,
    node_use: Option<EntryUse>,
}

/// How a controller has ended. Jobs run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllerEnd {
    /// No entry is desired and no job is left.
    NothingLeft,
    /// Another controller is to go on, or does.
    Left,
    /// The time of the controller's own job ends soon, or its next job is there.
    LeftItsJob {
        /// When the job ends.
        ends_at: SystemTime,
    },
}

/// Keeps the size of a fleet.
#[derive(Debug)]
pub struct Controller {
    setup: ControllerSetup,
    router: FleetClient<Channel>,
    records: BTreeMap<String, EntryRecord>,
    token_checked: Option<Instant>,
    cleaned_up: Option<Instant>,
    /// The batch job in which the controller runs itself.
    own_job: Option<OwnJob>,
    /// Whether the folder knows this scheduler by its name.
    is_scheduler_known: bool,
    attention: Attention,
    /// Time between two steps.
    interval: Duration,
    trouble: String,
}

impl Controller {
    /// A controller beside the router whose operators' socket the endpoint names. Needs a runtime.
    ///
    /// # Errors
    /// When the socket's path is invalid.
    pub fn new(setup: ControllerSetup) -> Result<Self, tonic::transport::Error> {
        let target = Target::from_shared(format!("unix:{}", setup.endpoint.operators_socket.display()))?;
        let channel = target.connect_timeout(CALL_TIMEOUT).timeout(CALL_TIMEOUT).connect_lazy();
        let router = FleetClient::new(channel);
        let own_job = OwnJob::of(&setup);
        Ok(Self {
            setup,
            router,
            records: BTreeMap::new(),
            token_checked: None,
            cleaned_up: None,
            own_job,
            is_scheduler_known: false,
            attention: Attention::default(),
            interval: step_interval(|name| std::env::var(name).ok()),
            trouble: String::new(),
        })
    }

    /// Steps until the shutdown drains, the fleet is empty, or another controller has its place or
    /// is to have it.
    ///
    /// The fleet is empty when no entry is desired and no job is left. Jobs outlive the return.
    ///
    /// Reading and writing files may hang, so it needs a thread of its own.
    pub async fn run(mut self, shutdown: Shutdown) -> ControllerEnd {
        let announcements = watch::Sender::new(ExpectRequest::default());
        let _announcing = AbortOnDropHandle::new(tokio::spawn(repeat_announcement(self.router.clone(), announcements.subscribe())));
        let stop = shutdown.wait_stop();
        let (folder, endpoint) = (self.setup.folder.clone(), self.setup.endpoint.clone());
        let end = tokio::select! {
            end = self.step_until(&shutdown, &announcements) => end,
            // The heartbeat stays on this thread: if files hang, so does the heartbeat.
            end = repeat_heartbeat(&folder, &endpoint, &shutdown) => end,
            () = stop => ControllerEnd::Left,
        };
        retire(&folder, &endpoint);
        end
    }

    async fn step_until(&mut self, shutdown: &Shutdown, announcements: &watch::Sender<ExpectRequest>) -> ControllerEnd {
        while !shutdown.is_draining() {
            let end = match self.step(shutdown).await {
                Ok(end) => end,
                Err(error) if error.is_final() => {
                    tracing::error!(event = "controller_ended", %error, "this controller ends and leaves all jobs as they are");
                    return ControllerEnd::Left;
                }
                Err(error) => {
                    self.attention = Attention::default();
                    self.note_trouble(error.to_string());
                    None
                }
            };
            let records = || self.records.values();
            let models = records().filter_map(|record| record.expected.clone()).collect();
            announcements.send_replace(announce(models, records().filter_map(|record| record.node_use.clone()).collect()));
            self.write_status();
            if let Some(end) = end {
                return end;
            }
            tokio::select! {
                () = sleep(self.interval) => {}
                () = shutdown.wait_drain() => {}
            }
        }
        ControllerEnd::Left
    }

    /// Runs one step. Returns how the controller ends, if it does.
    async fn step(&mut self, shutdown: &Shutdown) -> Result<Option<ControllerEnd>, StepError> {
        self.setup.check_place()?;
        // This comes before anything that can fail: the time ends even if the scheduler does not
        // answer.
        if let Some(job) = self.own_job.as_ref().filter(|job| job.is_over(SystemTime::now())) {
            tracing::info!("the time of the controller's job ends: it leaves its place to the next one");
            return Ok(Some(ControllerEnd::LeftItsJob { ends_at: job.ends_at() }));
        }
        let FleetFile { jobs, mut entries } = self.setup.folder.fleet_file()?;
        self.setup.adopt_job_settings(jobs);
        for name in self.setup.folder.remembered()? {
            if entries.iter().all(|entry| entry.name != name) {
                entries.push(removed_entry(name));
            }
        }
        if entries.is_empty() {
            if let Some(job) = &self.own_job {
                // Without the list of its jobs, the controller would leave one behind.
                job.end_successors(&self.setup).await?;
            }
            if self.setup.folder.close_if_empty()? {
                self.clean_up(Duration::ZERO);
                tracing::info!(event = "controller_ended", "nothing is wanted and no job is left: the controller ends");
                return Ok(Some(ControllerEnd::NothingLeft));
            }
        }
        let listed = self.router.list(ListRequest {}).await?.into_inner();
        let scene = Scene::new(entries, self.setup.jobs.clone(), self.setup.folder.standby()?, &listed);
        let is_succession_due = self.own_job.as_ref().is_some_and(|job| !job.is_settled(SystemTime::now()));
        if !is_succession_due && !self.attention.is_due(&scene, self.rest_interval(), Instant::now()) {
            return Ok(None);
        }
        if !self.is_scheduler_known {
            self.claim_scheduler().await?;
        }
        let mut trouble = String::new();
        if let Some(job) = &mut self.own_job {
            match job.step(&self.setup).await {
                Ok(false) => {}
                Ok(true) => return Ok(Some(ControllerEnd::LeftItsJob { ends_at: job.ends_at() })),
                Err(error) if error.is_final() => return Err(error),
                Err(error) => trouble = error.to_string(),
            }
        }
        if self.token_checked.is_none_or(|checked| checked.elapsed() >= TOKEN_INTERVAL) {
            self.renew_token(1)?;
        }
        for entry in &scene.entries {
            if shutdown.is_draining() {
                return Ok(None);
            }
            match self.step_entry(entry, &listed).await {
                Err(error) if error.is_final() => return Err(error),
                Err(error) => trouble = error.to_string(),
                Ok(()) => {}
            }
        }
        if trouble.is_empty() && self.cleaned_up.is_none_or(|cleaned_up| cleaned_up.elapsed() >= TOKEN_INTERVAL) {
            self.clean_up(IDENTITY_KEPT_FOR);
        }
        let now = SystemTime::now();
        let has_rest = |record: &EntryRecord| record.status.as_ref().is_some_and(|status| is_settled(&record.memory, status, now));
        let is_quiet = trouble.is_empty() && self.records.len() == scene.entries.len() && self.records.values().all(has_rest);
        self.attention.note(scene, is_quiet, Instant::now());
        self.note_trouble(trouble);
        Ok(None)
    }

    /// How often the scheduler is queried while nothing changes. In tests with short steps, rests
    /// are short too.
    fn rest_interval(&self) -> Duration {
        self.setup.jobs.cluster.poll_interval.mul_f64(self.interval.as_secs_f64() / STEP_INTERVAL.as_secs_f64())
    }

    /// Removes leftovers of unlisted jobs, and frees the names of their nodes. Nothing depends on
    /// it.
    fn clean_up(&mut self, identities_kept_for: Duration) {
        self.cleaned_up = Some(Instant::now());
        let jobs = self.records.values().filter_map(|record| record.status.as_ref()).flat_map(|status| &status.jobs);
        let gone = self.setup.folder.clean_up(jobs.map(|job| job.id.as_str()), identities_kept_for, SystemTime::now());
        let tokens = TokenStore::in_folder(&self.setup.authority);
        let cleaned: Result<(), StepError> =
            gone.map_err(StepError::from).and_then(|gone| Ok(gone.iter().try_for_each(|node| tokens.release_name(node))?));
        if let Err(error) = cleaned {
            tracing::debug!(%error, "not all was removed that jobs have left");
        }
    }

    async fn step_entry(&mut self, entry: &FleetEntry, listed: &ListResponse) -> Result<(), StepError> {
        let jobs = self.setup.scheduler.list(&self.setup.folder.job_name(&entry.name)).await?;
        let now = SystemTime::now();
        let mut record = match self.records.remove(&entry.name) {
            Some(record) => record,
            None => EntryRecord {
                memory: self.recall(&entry.name, !jobs.is_empty(), now)?,
                written: None,
                refusal: String::new(),
                status: None,
                expected: None,
                node_use: None,
            },
        };
        let taken = self.act(entry, &mut record, &jobs, listed).await;
        let names = model_names(entry, &self.setup.jobs.engine_args);
        let view = EntryView { entry, names: &names, memory: &record.memory, jobs: &jobs, nodes: &listed.nodes, refusal: &record.refusal };
        let (status, expected, node_use) = (report(&view, now), expect(&view, now), use_of_nodes(&view, now));
        note_budget(&entry.name, record.status.as_ref(), &status);
        (record.status, record.expected, record.node_use) = (Some(status), expected, Some(node_use));
        if is_removed(entry) && record.memory.is_over() {
            self.setup.folder.write_node_usage(&entry.name, record.memory.node_time())?;
            return Ok(self.setup.folder.forget(&entry.name)?);
        }
        self.records.insert(entry.name.clone(), record);
        taken
    }

    /// Decides one step of an entry, and carries it out.
    async fn act(
        &mut self,
        entry: &FleetEntry,
        record: &mut EntryRecord,
        jobs: &[ScheduledJob],
        listed: &ListResponse,
    ) -> Result<(), StepError> {
        let ControllerSetup { folder, scheduler, jobs: settings, .. } = &self.setup;
        let mut observation = observe(jobs, listed, &model_names(entry, &settings.engine_args), SystemTime::now());
        observation.form = job_form(settings, entry, folder, *scheduler);
        let (actions, memory) = decide(entry, &observation, &record.memory, SystemTime::now());
        let parts = actions.iter().find_map(|action| if let Action::Submit { parts } = action { Some(*parts) } else { None });
        if !actions.is_empty() {
            // Reading the list may have taken long.
            self.setup.check_place()?;
        }
        let submission = parts.map(|parts| self.prepare(entry, parts)).transpose()?;
        let is_old = record.written.is_none_or(|written| written.elapsed() >= MEMORY_INTERVAL);
        if !actions.is_empty() || is_old || !memory.has_jobs_of(&record.memory) {
            self.setup.folder.write_memory(&entry.name, &memory)?;
            self.setup.folder.write_node_usage(&entry.name, memory.node_time())?;
            record.written = Some(Instant::now());
        }
        record.memory = memory;
        let ended = self.end_jobs(&actions, listed).await;
        if let Some(submission) = submission {
            self.submit(entry, submission, record).await?;
        }
        ended
    }

    /// Drains and cancels jobs. If that fails, the next step repeats it.
    async fn end_jobs(&mut self, actions: &[Action], listed: &ListResponse) -> Result<(), StepError> {
        let mut drained = Ok(());
        let mut cancelled = Vec::new();
        for action in actions {
            match action {
                Action::Submit { .. } => {}
                Action::Cancel { job } => cancelled.push(job.clone()),
                Action::Drain { job } => {
                    let Some(node) = find_node(&listed.nodes, job) else { continue };
                    tracing::info!(event = "job_drained", job, node = node.name, "draining a job's node");
                    drained = drained.and(self.router.drain(TargetRequest { target: node.name.clone() }).await.map(drop));
                }
            }
        }
        if !cancelled.is_empty() {
            tracing::info!(event = "jobs_cancelled", jobs = ?cancelled, "cancelling jobs");
            self.setup.scheduler.cancel(&cancelled).await?;
        }
        Ok(drained?)
    }

    /// Makes the files that a submission refers to, before the submission is written down: a token
    /// for its jobs, and their script.
    fn prepare(&mut self, entry: &FleetEntry, parts: u32) -> Result<RenderedSubmission, StepError> {
        self.renew_token(parts)?;
        let ControllerSetup { folder, jobs, scheduler, .. } = &self.setup;
        let submission = scheduler.render(&build_submission(entry, parts, &jobs.cluster, folder, &JobProgram::of(jobs)));
        if let Some(file) = &submission.script_file {
            folder.write_script(file, &submission.script)?;
        }
        Ok(submission)
    }

    async fn submit(&mut self, entry: &FleetEntry, submission: RenderedSubmission, record: &mut EntryRecord) -> Result<(), StepError> {
        self.setup.check_place()?;
        match Scheduler::submit(submission).await {
            Ok(job) => {
                tracing::info!(event = "job_submitted", entry = entry.name, job, "submitted");
                record.refusal.clear();
                record.memory.confirm_submission();
                self.setup.folder.write_memory(&entry.name, &record.memory)?;
            }
            Err(error) => {
                tracing::warn!(event = "submission_failed", entry = entry.name, %error, "nothing was submitted, as far as is known");
                record.refusal = error.to_string();
                if is_refusal(&error) {
                    record.memory.record_refusal(SystemTime::now());
                    self.setup.folder.write_memory(&entry.name, &record.memory)?;
                }
            }
        }
        Ok(())
    }

    /// Records the scheduler in the folder. A scheduler that does not say its name is known by its
    /// kind, unless the folder has a name to compare with.
    async fn claim_scheduler(&mut self) -> Result<(), StepError> {
        let ControllerSetup { folder, scheduler, .. } = &self.setup;
        let found = match scheduler.identify().await {
            Ok(found) => found,
            Err(error) if folder.scheduler()?.is_some_and(|known| known.name.is_some()) => return Err(error.into()),
            Err(_) => SchedulerIdentity { kind: *scheduler, name: None },
        };
        folder.claim_scheduler(&found)?;
        self.is_scheduler_known = found.name.is_some();
        Ok(())
    }

    /// Memory of an entry. Whoever submitted its jobs has written it before, unless it was lost.
    fn recall(&self, name: &str, has_jobs: bool, now: SystemTime) -> Result<Memory, FolderError> {
        match self.setup.folder.memory(name) {
            Ok(Some(memory)) => Ok(memory),
            Ok(None) if !has_jobs => Ok(Memory::default()),
            Ok(None) => Ok(Memory::lost(now)),
            Err(error @ FolderError::Unreadable { .. }) => {
                tracing::warn!(entry = name, %error, "its memory is lost: nothing is submitted for two minutes");
                Ok(Memory::lost(now))
            }
            Err(error) => Err(error),
        }
    }

    fn renew_token(&mut self, nodes: u32) -> Result<(), TlsError> {
        join_token::renew(&self.setup.authority, &self.setup.folder.join_token(), nodes, hostler_tls::now())?;
        self.token_checked = Some(Instant::now());
        Ok(())
    }

    fn note_trouble(&mut self, trouble: String) {
        if trouble == self.trouble {
            return;
        }
        if trouble.is_empty() {
            tracing::info!(event = "step_recovered", "scheduler and router answer again");
        } else {
            tracing::warn!(event = "step_failed", trouble, "an entry has no step");
        }
        self.trouble = trouble;
    }

    fn write_status(&mut self) {
        let entries = self.records.values().filter_map(|record| record.status.clone()).collect();
        let status = FleetStatus { at: SystemTime::now(), entries, trouble: self.trouble.clone() };
        if let Err(error) = self.setup.folder.write_status(&status) {
            self.note_trouble(error.to_string());
        }
    }
}

/// Sends each new announcement to the router, and repeats the last one.
async fn repeat_announcement(mut router: FleetClient<Channel>, mut latest: watch::Receiver<ExpectRequest>) {
    loop {
        let announcement = latest.borrow_and_update().clone();
        if let Err(status) = router.expect(announcement).await {
            tracing::debug!(%status, "the announcement was not taken");
        }
        tokio::select! {
            changed = latest.changed() => if changed.is_err() { return },
            () = sleep(ANNOUNCE_INTERVAL) => {}
        }
    }
}

/// Shows other hosts that this controller lives, whatever a step waits for. When told to end, it
/// retires the endpoint at once, because commands start the next controller.
async fn repeat_heartbeat(folder: &FleetFolder, endpoint: &Endpoint, shutdown: &Shutdown) -> ControllerEnd {
    loop {
        let written = tokio::select! {
            () = sleep(HEARTBEAT_INTERVAL) => folder.renew_endpoint(endpoint),
            () = shutdown.wait_drain() => break,
        };
        if let Err(error) = written {
            tracing::debug!(%error, "the endpoint was not renewed");
        }
    }
    retire(folder, endpoint);
    std::future::pending().await
}

fn retire(folder: &FleetFolder, endpoint: &Endpoint) {
    if let Err(error) = folder.retire_endpoint(endpoint) {
        tracing::debug!(%error, "other commands see only later that this controller has ended");
    }
}

/// Logs that an entry's budget is near its end, and its end.
fn note_budget(entry: &str, before: Option<&EntryStatus>, status: &EntryStatus) {
    let Some(left) = &status.budget else { return };
    let was = |test: fn(&BudgetLeft) -> bool| before.and_then(|before| before.budget.as_ref()).is_some_and(test);
    if left.is_over() && !was(BudgetLeft::is_over) {
        tracing::warn!(event = "budget_over", entry, "the budget has ended ({}): its nodes leave", left.describe());
    } else if left.is_near() && !was(BudgetLeft::is_near) {
        let minutes = left.ends_in.unwrap_or_default().as_secs().div_ceil(60);
        tracing::warn!(event = "budget_near", entry, "the budget ends in {minutes} minutes ({})", left.describe());
    }
}

/// Stand-in for an entry that is no longer desired but may have jobs left.
fn removed_entry(name: String) -> FleetEntry {
    FleetEntry {
        name,
        model: String::new(),
        size: FleetSize::Fixed(0),
        walltime: Duration::ZERO,
        engine_args: Vec::new(),
        nodes_per_replica: 1,
        queue: String::new(),
        account: String::new(),
        resources: String::new(),
        budget: Budget::default(),
        asked: 0,
    }
}

fn is_removed(entry: &FleetEntry) -> bool {
    entry.model.is_empty()
}

/// Time between two steps. Tests shorten it with `HOSTLER_STEP_INTERVAL_MS`.
fn step_interval(variable: impl Fn(&str) -> Option<String>) -> Duration {
    let set = variable("HOSTLER_STEP_INTERVAL_MS").and_then(|text| text.parse().ok()).map(Duration::from_millis);
    set.filter(|interval| !interval.is_zero()).unwrap_or(STEP_INTERVAL)
}

#[cfg(test)]
mod tests;
