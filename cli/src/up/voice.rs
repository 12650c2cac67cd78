//! How `hostler up` speaks to a person at a terminal: a few lines that change, and its log in a
//! file. Elsewhere it prints lines for scripts, and logs to standard error.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;

use hostler_boot::telemetry::LogFile;
use hostler_proto::fleet::v1::{FleetFinding, Replica};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use rustix::process::getpgrp;
use rustix::stdio::{dup2_stderr, dup2_stdout};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use tokio_util::task::AbortOnDropHandle;

use crate::local_fleet::{UpLog, keep_bounded};
use crate::output::{clean, say};
use crate::ps::finding_lines;
use crate::startup_progress::StartupProgress;

/// Most engines that have a line each while they start. A screen has 24.
const MAX_BARS: usize = 8;

const LEAVING: &str = "leaving  running requests may finish; Ctrl-C again stops at once";

#[derive(Debug)]
pub(crate) struct Voice {
    screen: Option<Screen>,
    /// The log's file, where there is a screen.
    file: Option<LogFile>,
    /// Whether standard output and error are the log of a process in the background.
    is_background: bool,
    /// Whether lines for scripts are printed.
    has_lines: bool,
    progress: StartupProgress,
}

impl Voice {
    /// That of this command, and the file that its log goes to where a terminal shows something
    /// else.
    pub(crate) fn of_this_command(is_background: bool) -> (Self, Option<LogFile>) {
        let is_terminal = stderr().is_terminal() && !matches!(std::env::var("TERM").as_deref(), Err(_) | Ok("" | "dumb"));
        // A user without a home has the log on the terminal.
        let log = Some(()).filter(|()| is_terminal).and_then(|()| UpLog::of_this_process().ok());
        let has_lines = log.is_none() || !stdout().is_terminal();
        let (screen, file) = log.map(|UpLog { path, file }| (Screen::new(path), LogFile::new(file))).unzip();
        (Self { screen, file: file.clone(), is_background, has_lines, progress: StartupProgress::default() }, file)
    }

    /// The file of the log; `None` if that is standard error.
    pub(super) fn log(&self) -> Option<&Path> {
        self.screen.as_ref().map(|screen| screen.log.as_path())
    }

    pub(super) fn is_background(&self) -> bool {
        self.is_background
    }

    /// Has the log begin anew when it is large, until the result is dropped. `None` where the log
    /// is somebody else's.
    pub(super) fn keep_log_bounded(&self) -> Option<AbortOnDropHandle<()>> {
        let task = match (self.log(), &self.file) {
            (Some(path), Some(file)) => {
                let (path, file) = (path.to_owned(), file.clone());
                tokio::spawn(keep_bounded(move || Some(path.clone()), move |next| file.replace(next)))
            }
            _ if self.is_background => tokio::spawn(keep_bounded(path_of_standard_error, |next| {
                // Who cannot duplicate a descriptor goes on with the old file.
                let _ = dup2_stdout(&next).and_then(|()| dup2_stderr(&next));
            })),
            _ => return None,
        };
        Some(AbortOnDropHandle::new(task))
    }

    /// Whether it goes on after the start.
    pub(super) fn is_screen(&self) -> bool {
        self.screen.is_some()
    }

    /// Says a line to scripts and people.
    pub(super) fn say(&self, line: &str) {
        match &self.screen {
            Some(screen) if !self.has_lines => screen.print(line),
            _ => say(line),
        }
    }

    /// Says a line to scripts alone.
    pub(super) fn say_to_scripts(&self, line: &str) {
        if self.has_lines {
            say(line);
        }
    }

    /// Says a line to people alone.
    pub(super) fn say_to_people(&self, line: &str) {
        if let Some(screen) = &self.screen {
            screen.print(line);
        }
    }

    /// Shows how far the engines have come, and what is wrong.
    pub(super) fn show(&mut self, replicas: &[Replica], findings: &[FleetFinding]) {
        let lines = self.progress.lines(replicas, Instant::now());
        match &mut self.screen {
            None => lines.iter().for_each(|line| say(line)),
            Some(screen) => {
                if self.has_lines {
                    lines.iter().for_each(|line| say(line));
                }
                let down: Vec<Replica> = replicas.iter().filter(|replica| !replica.is_coming()).cloned().collect();
                screen.failures.lines(&down, Instant::now()).iter().for_each(|line| screen.print(line));
                screen.show(replicas, findings);
            }
        }
    }

    /// Shows that this process ends when its requests have.
    pub(super) fn leave(&mut self) {
        if let Some(screen) = &mut self.screen {
            screen.bars.values().for_each(ProgressBar::finish_and_clear);
            screen.status.set_message(LEAVING);
        }
    }
}

/// The file that `--detach` has given this process. It gets its name a moment later.
fn path_of_standard_error() -> Option<PathBuf> {
    std::fs::read_link("/proc/self/fd/2").ok().filter(|path| path.is_file())
}

/// Lines at the end of a terminal that change: one for each engine that starts, and one about all.
#[derive(Debug)]
struct Screen {
    log: PathBuf,
    lines: MultiProgress,
    bars: BTreeMap<String, ProgressBar>,
    status: ProgressBar,
    failures: StartupProgress,
    _echo: Option<QuietEcho>,
}

/// A terminal that shows no `^C` for Ctrl-C, until this is dropped: that would stand on a line of
/// its own, and the one above it would stay.
#[derive(Debug)]
struct QuietEcho(Termios);

impl QuietEcho {
    fn begin() -> Option<Self> {
        let before = tcgetattr(stderr()).ok()?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHOCTL);
        set_terminal(&quiet).then_some(Self(before))
    }
}

/// Sets the terminal, if this process has it: the kernel would stop one in the background.
fn set_terminal(modes: &Termios) -> bool {
    tcgetpgrp(stderr()).is_ok_and(|foreground| foreground == getpgrp()) && tcsetattr(stderr(), OptionalActions::Now, modes).is_ok()
}

impl Drop for QuietEcho {
    fn drop(&mut self) {
        set_terminal(&self.0);
    }
}

impl Screen {
    fn new(log: PathBuf) -> Self {
        let lines = MultiProgress::new();
        let plain = ProgressStyle::with_template("{wide_msg}").expect("the template is sound");
        let status = lines.add(ProgressBar::new(0).with_style(plain));
        let echo = QuietEcho::begin();
        Self { log, lines, bars: BTreeMap::new(), status, failures: StartupProgress::default(), _echo: echo }
    }

    /// Prints a line that stays.
    fn print(&self, line: &str) {
        // A terminal that is gone is nobody's loss.
        let _ = self.lines.println(clean(line));
    }

    fn show(&mut self, replicas: &[Replica], findings: &[FleetFinding]) {
        let coming = || replicas.iter().filter(|replica| replica.is_coming());
        self.bars.retain(|id, bar| {
            let stays = coming().any(|replica| replica.id == *id);
            if !stays {
                bar.finish_and_clear();
                self.lines.remove(bar);
            }
            stays
        });
        for replica in coming() {
            if !self.bars.contains_key(&replica.id) && self.bars.len() < MAX_BARS {
                let style = ProgressStyle::with_template("{prefix}  {bar:16.cyan} {wide_msg}").expect("the template is sound");
                let bar = ProgressBar::new(100).with_style(style.progress_chars("━━╌")).with_prefix(clean(&replica.id));
                self.bars.insert(replica.id.clone(), self.lines.insert_before(&self.status, bar));
            }
            let Some(bar) = self.bars.get(&replica.id) else { continue };
            let progress = replica.state().progress.as_ref();
            bar.set_position(progress.map_or(0, |progress| progress.percent.into()));
            bar.set_message(clean(&progress.map_or_else(|| replica.first_reason().to_owned(), |progress| progress.sentence())));
        }
        self.status.set_message(clean(&status(replicas, findings)));
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A bar that is dropped without an end stays on the screen.
        self.bars.values().chain([&self.status]).for_each(ProgressBar::finish_and_clear);
    }
}

/// One line about all engines; if requests fail, about that.
fn status(replicas: &[Replica], findings: &[FleetFinding]) -> String {
    if let Some(trouble) = finding_lines(findings).first() {
        return trouble.clone();
    }
    let ready = replicas.iter().filter(|replica| replica.is_ready()).count();
    if replicas.is_empty() {
        return "starting  looking at this machine".to_owned();
    }
    if ready == 0 && replicas.iter().any(Replica::is_coming) {
        return format!("starting  {}", if replicas.len() == 1 { "1 replica".to_owned() } else { format!("{} replicas", replicas.len()) });
    }
    let sum = |count: fn(&Replica) -> u64| replicas.iter().map(count).sum::<u64>();
    let (in_flight, served) = (sum(|replica| replica.load().in_flight.into()), sum(|replica| replica.load().served));
    format!("serving  {ready} of {} replicas; {in_flight} requests in flight, {served} answered", replicas.len())
}

#[cfg(test)]
mod tests {
    use hostler_proto::agent::v1::{Load, Phase, ReplicaState};

    use super::*;

    fn replica(phase: Phase, in_flight: u32, served: u64) -> Replica {
        let state = ReplicaState { phase: phase.into(), ..ReplicaState::default() };
        Replica { state: Some(state), load: Some(Load { in_flight, served, ..Load::default() }), ..Replica::default() }
    }

    #[test]
    fn one_line_says_how_all_engines_are() {
        assert_eq!(status(&[], &[]), "starting  looking at this machine");
        assert_eq!(status(&[replica(Phase::Loading, 0, 0)], &[]), "starting  1 replica");
        let some = [replica(Phase::Ready, 2, 7), replica(Phase::Loading, 0, 0), replica(Phase::Ready, 1, 3)];
        assert_eq!(status(&some, &[]), "serving  2 of 3 replicas; 3 requests in flight, 10 answered");
        assert_eq!(status(&[replica(Phase::Failed, 0, 0)], &[]), "serving  0 of 1 replicas; 0 requests in flight, 0 answered");
    }

    #[test]
    fn requests_that_fail_come_before_all_else() {
        let finding = FleetFinding { evidence: "9 of 10 requests failed".into(), advice: "look".into(), ..FleetFinding::default() };
        assert_eq!(status(&[replica(Phase::Ready, 0, 0)], &[finding]), "TROUBLE  9 of 10 requests failed: look");
    }
}
