//! `hostler up --detach`: starts the same command in the background, waits until it serves, and
//! leaves it there.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hostler_proto::fleet::v1::Replica;
use tokio::time::sleep;

use super::{Invitation, REPLACED};
use crate::file_end::read_end;
use crate::local_fleet::{LocalFleet, UpLog, find_local_fleets};
use crate::output::say;
use crate::startup_progress::StartupProgress;
use crate::up_record::check_room;

/// How often the command in the background is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Bytes at the end of the log in which its error is looked for.
const LOG_TAIL: u64 = 8192;

/// The flag in place of `--detach` on the command line of the process in the background.
pub(crate) const BACKGROUND: &str = "--background";

#[derive(Debug, thiserror::Error)]
#[error("{said}")]
pub(crate) struct EndedInBackground {
    code: u8,
    /// The last error in its log.
    said: String,
}

impl EndedInBackground {
    /// That of the process in the background.
    pub(crate) fn exit_code(&self) -> u8 {
        self.code
    }

    fn of(ended: ExitStatus, log: &Path) -> Self {
        if ended.success() {
            // A process that serves ends well only when it is told to.
            if read_end(log, LOG_TAIL).is_ok_and(|text| text.contains(REPLACED)) {
                return Self { code: 1, said: "another `hostler up --takeover` has taken its place".to_owned() };
            }
            return Self { code: 1, said: "it was taken down before it served, by `hostler down` or a signal".to_owned() };
        }
        let text = read_end(log, LOG_TAIL).unwrap_or_default();
        let said = text.rfind("error: ").map(|at| text[at..].trim_start_matches("error: ").trim_end().to_owned());
        let said = said.unwrap_or_else(|| format!("it has ended: {ended}; its log is {}", log.display()));
        // A signal has no code.
        Self { code: ended.code().and_then(|code| u8::try_from(code).ok()).filter(|code| *code > 0).unwrap_or(1), said }
    }
}

/// Starts the command in the background, and waits until it serves.
///
/// # Errors
/// What it says when it ends instead.
pub(crate) async fn detach() -> anyhow::Result<()> {
    let log = UpLog::of_this_process()?;
    check_room()?;
    let program = std::env::current_exe().context("this program does not know its own path")?;
    let mut command = Command::new(&program);
    command.args(in_background(std::env::args_os().skip(1))).stdin(Stdio::null());
    command.stdout(log.file.try_clone()?).stderr(log.file.try_clone()?);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let log = match log.give_to(child.id()) {
        Ok(log) => log,
        Err(error) => {
            // Nobody would find its log.
            let _ = child.kill().and_then(|()| child.wait());
            return Err(error);
        }
    };
    say(&format!("log     {}", log.display()));
    tokio::select! {
        serves = until_serves(&mut child, &log) => invite(&serves?),
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            bail!("it goes on starting in the background: `hostler wait` waits for it, `hostler down` ends it");
        }
    }
    Ok(())
}

/// The same words, with the flag for the process in the background.
fn in_background(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_engines = false;
    words
        .map(|word| {
            is_engines |= word == "--";
            if word == "--detach" && !is_engines { BACKGROUND.into() } else { word }
        })
        .collect()
}

async fn until_serves(child: &mut Child, log: &Path) -> anyhow::Result<LocalFleet> {
    let mut progress = StartupProgress::default();
    loop {
        if let Some(ended) = child.try_wait()? {
            return Err(EndedInBackground::of(ended, log).into());
        }
        let own = find_local_fleets().await.into_iter().find(|fleet| u32::try_from(fleet.record.pid) == Ok(child.id()));
        if let Some(own) = own {
            progress.lines(&own.replicas, Instant::now()).iter().for_each(|line| say(line));
            let own = own.with_own_replicas();
            if own.replicas.iter().any(Replica::is_ready) && !own.replicas.iter().any(Replica::is_coming) {
                return Ok(own);
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Says how to use it, and how to follow and end it.
fn invite(fleet: &LocalFleet) {
    let router = &fleet.record.router;
    let ready: Vec<&Replica> = fleet.replicas.iter().filter(|replica| replica.is_ready()).collect();
    say(&format!("edge    {}", router.base_url));
    say(&format!("ready   {} of {} replicas, in the background as process {}", ready.len(), fleet.replicas.len(), fleet.record.pid));
    let model = ready.iter().find_map(|replica| replica.model_ids().next()).unwrap_or_default();
    if !model.is_empty() {
        say(&Invitation::to(router, None).curl(model));
    }
    let engine = ready.first().map_or("", |replica| replica.id.as_str());
    say(&format!(
        "next    `hostler ps` and `hostler top` show it, `hostler logs -f {engine}` follows an engine, `hostler down {model}` ends it"
    ));
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_command_in_the_background_has_the_same_words() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(
            in_background(words("--config f up tiny --detach --tp 2 -- --detach").into_iter()),
            words("--config f up tiny --background --tp 2 -- --detach")
        );
    }

    #[test]
    fn an_end_in_the_background_is_said_with_its_code() {
        let place = tempfile::tempdir().unwrap();
        let log = place.path().join("log");
        std::fs::write(&log, "INFO begun\nerror: no engine: of one\nwhat to do: mend\n").unwrap();
        let ended = EndedInBackground::of(ExitStatus::from_raw(4 << 8), &log);
        assert_eq!((ended.exit_code(), ended.to_string().as_str()), (4, "no engine: of one\nwhat to do: mend"));
        std::fs::write(&log, "INFO begun\n").unwrap();
        let taken_down = EndedInBackground::of(ExitStatus::from_raw(0), &log);
        assert!(taken_down.exit_code() == 1 && taken_down.to_string().starts_with("it was taken down before it served"), "{taken_down}");
        let killed = EndedInBackground::of(ExitStatus::from_raw(9), &log);
        assert_eq!(killed.exit_code(), 1);
        assert!(killed.to_string().starts_with("it has ended: signal: 9"), "{killed}");
    }
}
