//! Engines as tasks of the agent's own process, which sends the agent the notices of a keeper.
//!
//! For tests with tokio's paused clock, which other processes do not have.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::BytesMut;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::wire::{self, KeeperNotice, KeeperRequest, LaunchSpec, PROTOCOL};
use crate::process::LeaderProcess;

/// First id, beyond the greatest process id of Linux (2^22), so that no process is ever mistaken
/// for an engine.
const FIRST_ID: u32 = 5_000_000;

/// The engine that a keeper would have started.
#[derive(Debug)]
pub struct EngineLaunch {
    pub arguments: Vec<OsString>,
    /// Variables that are set for the engine.
    pub set: Vec<(OsString, OsString)>,
}

/// Life of an engine, until it ends by itself or some time after the token is cancelled, as after
/// SIGTERM. `false` is a failure.
///
/// A killed engine is dropped.
type RunEngine = fn(EngineLaunch, CancellationToken) -> BoxFuture<'static, bool>;

/// Engines that run in this process.
#[derive(Debug)]
pub struct InProcessEngines {
    run: RunEngine,
    next_id: AtomicU32,
    running: Mutex<BTreeMap<u32, EngineSignals>>,
    tasks: TaskTracker,
}

#[derive(Debug, Clone, Default)]
struct EngineSignals {
    terminate: CancellationToken,
    kill: CancellationToken,
}

impl InProcessEngines {
    #[must_use]
    pub fn new(run: RunEngine) -> Arc<Self> {
        Arc::new(Self { run, next_id: AtomicU32::new(FIRST_ID), running: Mutex::default(), tasks: TaskTracker::new() })
    }

    /// Kills the engine with this id in the agent's reports, as SIGKILL from a third party would.
    pub fn kill(&self, id: u32) {
        self.running.lock().get(&id).inspect(|engine| engine.kill.cancel());
    }

    /// Asks the engine with this id to end, as SIGTERM from a third party would.
    pub fn terminate(&self, id: u32) {
        self.running.lock().get(&id).inspect(|engine| engine.terminate.cancel());
    }

    #[must_use]
    pub fn is_running(&self, id: u32) -> bool {
        self.running.lock().contains_key(&id)
    }

    /// Starts an engine that sends notices and receives requests over `agent`.
    pub(super) fn start(self: &Arc<Self>, agent: StdStream, launch: LaunchSpec) -> io::Result<()> {
        agent.set_nonblocking(true)?;
        let (id, agent) = (self.next_id.fetch_add(1, Ordering::Relaxed), UnixStream::from_std(agent)?);
        let signals = EngineSignals::default();
        self.running.lock().insert(id, signals.clone());
        let engines = self.clone();
        // This task ends when the agent's end of the connection does.
        self.tasks.spawn(async move {
            let kept = KeptEngine { agent, signals, input: BytesMut::new() };
            // An error means that the agent is gone.
            let _ = kept.run(&engines, id, launch).await;
            engines.running.lock().remove(&id);
        });
        Ok(())
    }
}

struct KeptEngine {
    agent: UnixStream,
    signals: EngineSignals,
    input: BytesMut,
}

impl KeptEngine {
    async fn run(mut self, engines: &InProcessEngines, id: u32, launch: LaunchSpec) -> io::Result<()> {
        self.tell(&KeeperNotice::Hello { protocol: PROTOCOL, running: None }).await?;
        self.tell(&KeeperNotice::Started(LeaderProcess { pid: id.cast_signed(), started: 0 })).await?;
        let launch = EngineLaunch { arguments: launch.process.arguments, set: launch.process.set };
        let mut engine = Some((engines.run)(launch, self.signals.terminate.clone()));
        loop {
            let signals = self.signals.clone();
            tokio::select! {
                biased;
                request = self.request() => match request? {
                    KeeperRequest::Terminate => self.signals.terminate.cancel(),
                    KeeperRequest::Kill => {
                        drop(engine);
                        engines.running.lock().remove(&id);
                        return self.tell(&KeeperNotice::Empty).await;
                    }
                    KeeperRequest::Prepare(_) | KeeperRequest::Start(_) | KeeperRequest::Adopt { .. } | KeeperRequest::Note(_) => {}
                },
                status = life(engine.as_mut(), &signals.kill) => {
                    engine = None;
                    engines.running.lock().remove(&id);
                    self.tell(&KeeperNotice::Exited(status.into_raw())).await?;
                }
            }
        }
    }

    async fn tell(&mut self, notice: &KeeperNotice) -> io::Result<()> {
        let mut out = BytesMut::new();
        wire::write_message(notice, &mut out);
        self.agent.write_all(&out).await
    }

    async fn request(&mut self) -> io::Result<KeeperRequest> {
        loop {
            if let Some(request) = wire::parse_request(&mut self.input)? {
                return Ok(request);
            }
            if self.agent.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Exit status of an engine; never resolves without an engine.
async fn life(engine: Option<&mut BoxFuture<'static, bool>>, kill: &CancellationToken) -> ExitStatus {
    let Some(engine) = engine else { return std::future::pending().await };
    tokio::select! {
        biased;
        () = kill.cancelled() => ExitStatus::from_raw(Signal::KILL.as_raw()),
        succeeded = engine => ExitStatus::from_raw(if succeeded { 0 } else { 1 << 8 }),
    }
}
