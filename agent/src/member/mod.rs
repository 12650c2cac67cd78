//! A member of a replica over several nodes: it starts and kills its part of the engine as the head
//! says, and tells the head what becomes of it.
//!
//! A part never ends by itself when another one is gone (vLLM 0.33), so a member that has lost its
//! head ends its own.

mod link;
mod part;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hostler_boot::Shutdown;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use self::link::{DialFailure, Link};
use self::part::{Part, PartEvent};
use crate::engine::EngineSpec;
use crate::engine::diagnosis::EndCause;
use crate::gang::GangPlace;
use crate::gang::address::{address_of, interface_with};
use crate::gang::beat::Beats;
use crate::gang::setup::PartSetup;
use crate::gang::wire::{HeadMessage, Hello, MemberMessage, PROTOCOL, PartActivity, PartEnd};
use crate::join::PeerAccess;
use crate::uplink::{AttachLimits, AttachedGuard, Attachments, Backoff};
use crate::vllm::MeetingPoint;

/// After this silence the member opens another connection: a network that was down delays the old
/// one by as much again.
const REDIAL_AFTER: Duration = Duration::from_secs(5);

/// Time for a keeper to say that nothing is left, before the keeper itself is ended.
const KILL_TIMEOUT: Duration = Duration::from_secs(15);

/// Time for the last words to the head.
const FAREWELL: Duration = Duration::from_millis(200);

/// Settings and handles of a member.
#[derive(Debug)]
pub(crate) struct MemberParts {
    pub(crate) place: GangPlace,
    pub(crate) spec: EngineSpec,
    pub(crate) setup: PartSetup,
    pub(crate) host: String,
    pub(crate) gpus: Vec<String>,
    /// Interface for the engine's own connections; empty means the one on which the head is
    /// reached.
    pub(crate) interface: String,
    pub(crate) access: PeerAccess,
    pub(crate) limits: AttachLimits,
    /// How long the member waits for its head once it has to leave, in a hurry or not.
    pub(crate) leave_within: [Duration; 2],
}

/// How a member has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum MemberEnd {
    /// The head has let it go, or it was told to leave.
    Left,
    /// No head takes it, for this reason.
    Unattached(String),
    /// These processes did not die in time.
    ProcessesLeft,
}

/// Checks that are under way before a part may start, and their epoch.
type Preparing = (u64, Pin<Box<dyn Future<Output = Option<String>> + Send>>);

pub(crate) struct Member {
    parts: MemberParts,
    life: u64,
    part: Option<Part>,
    preparing: Option<Preparing>,
    link: Option<Link>,
    /// The head has taken the member in on this connection.
    attached: Option<AttachedGuard>,
    dial: Option<AbortOnDropHandle<Result<Link, DialFailure>>>,
    dial_at: Instant,
    backoff: Backoff,
    attachments: Arc<Attachments>,
    /// Reason why the head was not reached, which is logged once.
    last_failure: String,
    /// When the head was last heard.
    heard: Instant,
    /// When the part that is being killed should be gone.
    killed_by: Option<Instant>,
    /// Reason why the member leaves, and when it does so without its head.
    leaving: Option<(String, Instant)>,
    /// It leaves as soon as a scheduler wants it gone.
    is_hurried: bool,
    /// The head has let the member go.
    is_let_go: bool,
}

impl Member {
    pub(crate) fn new(parts: MemberParts) -> Self {
        let now = Instant::now();
        Self {
            parts,
            life: fastrand::u64(1..),
            part: None,
            preparing: None,
            link: None,
            attached: None,
            dial: None,
            dial_at: now,
            backoff: Backoff::default(),
            attachments: Arc::new(Attachments::to_head()),
            last_failure: String::new(),
            heard: now,
            killed_by: None,
            leaving: None,
            is_hurried: false,
            is_let_go: false,
        }
    }

    /// Serves the head until it lets the member go, or the member has to leave. Nothing is left
    /// running then, unless the end says so.
    pub(crate) async fn run(mut self, shutdown: &Shutdown) -> MemberEnd {
        let mut beats = Beats::new();
        let (attachments, limits) = (self.attachments.clone(), self.parts.limits);
        let given_up = attachments.wait_given_up(limits);
        tokio::pin!(given_up);
        loop {
            self.dial_if_needed();
            let give_up_at = self.leaving.as_ref().map(|(_, at)| *at);
            tokio::select! {
                biased;
                () = shutdown.wait_stop() => break,
                () = shutdown.wait_hurry(), if self.leaving.is_some() && !self.is_hurried => self.hurry(),
                () = shutdown.wait_drain(), if self.leaving.is_none() => self.leave(shutdown.is_hurried()),
                event = next_event(&mut self.part) => self.handle_part(event),
                message = next_message(&mut self.link) => self.handle_message(message),
                dialled = await_some(&mut self.dial) => self.handle_dialled(dialled),
                refusal = prepared(&mut self.preparing) => self.answer_prepare(refusal),
                paused = beats.next() => self.beat(paused).await,
                () = sleep_until(give_up_at.unwrap_or_else(Instant::now)), if give_up_at.is_some() => break,
                reason = &mut given_up, if self.part.is_none() && self.leaving.is_none() => return MemberEnd::Unattached(reason),
            }
            if self.part.is_none() && (self.is_let_go || self.leaving.is_some()) {
                break;
            }
        }
        self.end().await
    }

    /// Ends what is left of the part, and the connection.
    async fn end(mut self) -> MemberEnd {
        let deadline = Instant::now() + KILL_TIMEOUT;
        if let Some(part) = &mut self.part {
            part.kill();
        }
        while self.part.is_some() {
            tokio::select! {
                event = next_event(&mut self.part) => self.handle_part(event),
                () = sleep_until(deadline) => return MemberEnd::ProcessesLeft,
            }
        }
        // The carrier sends what waits.
        tokio::time::sleep(FAREWELL).await;
        MemberEnd::Left
    }

    fn leave(&mut self, is_hurried: bool) {
        let within = self.parts.leave_within[usize::from(!is_hurried)];
        let reason = "the agent was told to leave".to_owned();
        self.tell(MemberMessage::Leaving(reason.clone()));
        (self.leaving, self.is_hurried) = (Some((reason, Instant::now() + within)), is_hurried);
    }

    fn hurry(&mut self) {
        self.is_hurried = true;
        if let Some((_, at)) = &mut self.leaving {
            *at = (*at).min(Instant::now() + self.parts.leave_within[0]);
        }
    }

    fn tell(&self, message: MemberMessage) {
        if let Some(link) = &self.link {
            link.send(message);
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.parts.spec.node.clone(),
            host: self.parts.host.clone(),
            number: self.parts.place.number,
            life: self.life,
            gpus: self.parts.gpus.clone(),
            epoch: self.part.as_ref().map(|part| part.epoch),
        }
    }

    fn dial_if_needed(&mut self) {
        let is_silent = self.link.is_none() || self.heard.elapsed() > REDIAL_AFTER;
        if is_silent && self.dial.is_none() && Instant::now() >= self.dial_at && !self.is_let_go {
            let (head, access, hello) = (self.parts.place.head.clone(), self.parts.access.clone(), self.hello());
            self.dial = Some(AbortOnDropHandle::new(tokio::spawn(Link::dial(head, access, hello))));
        }
    }

    fn handle_dialled(&mut self, dialled: Result<Link, DialFailure>) {
        self.dial = None;
        match dialled {
            Ok(link) => {
                // The head answers with its welcome, or refuses.
                self.dial_at = Instant::now() + REDIAL_AFTER;
                (self.link, self.attached) = (Some(link), None);
            }
            Err(failure) => {
                self.dial_at = Instant::now() + self.backoff.next_delay();
                let address = self.link.as_ref().map_or_else(|| ([0, 0, 0, 0], 0).into(), |link| link.head);
                self.attachments.record_failure(address, failure.reason());
                if self.last_failure != failure.reason() {
                    failure.reason().clone_into(&mut self.last_failure);
                    tracing::warn!(
                        event = "head_unreachable",
                        reason = failure.reason(),
                        "the head of the replica is not reached; trying on"
                    );
                }
                if let (DialFailure::NobodyThere(reason), None) = (&failure, &self.link) {
                    self.end_part(&format!("the head's agent is gone ({reason}), and its part of the engine with it"));
                }
            }
        }
    }

    fn handle_message(&mut self, message: Option<HeadMessage>) {
        let Some(message) = message else {
            (self.link, self.attached) = (None, None);
            // An agent that ends closes its connections, and may be back already.
            self.dial_at = Instant::now() + self.backoff.next_delay();
            return;
        };
        // A refusal is no sign that the head still has this member.
        if !matches!(message, HeadMessage::Refused(_)) {
            self.heard = Instant::now();
        }
        match message {
            HeadMessage::Welcome { lease_ms } => {
                self.parts.place.lease = Duration::from_millis(lease_ms);
                self.backoff = Backoff::default();
                self.attached = Some(self.attachments.record_attached());
                self.last_failure.clear();
                tracing::info!(event = "head_joined", number = self.parts.place.number, "the head of the replica has taken this node in");
                // The part may have ended since the member said that it has one.
                if self.part.is_none() {
                    self.tell(MemberMessage::Empty);
                }
                if let Some((reason, _)) = &self.leaving {
                    self.tell(MemberMessage::Leaving(reason.clone()));
                }
            }
            HeadMessage::Refused(reason) => {
                self.attached = None;
                if let Some(link) = self.link.take() {
                    self.attachments.record_refusal(link.head, &reason);
                }
                tracing::error!(event = "head_refused", reason, "the head of the replica does not take this node in");
                self.end_part("the head does not take this node in any more");
                self.dial_at = Instant::now() + REDIAL_AFTER;
            }
            HeadMessage::Prepare { epoch } => self.prepare(epoch),
            HeadMessage::Start { epoch, address, port } => self.start(epoch, &address, port),
            HeadMessage::Served { epoch } => {
                if let Some(part) = self.part.as_mut().filter(|part| part.epoch == epoch && !part.is_ending) {
                    part.mark_served();
                }
            }
            HeadMessage::Kill => self.kill_or_say_empty(),
            HeadMessage::Beat => {}
            HeadMessage::Leave(reason) => {
                tracing::info!(event = "head_left", reason, "the head lets this node go");
                self.is_let_go = true;
                self.kill_or_say_empty();
            }
        }
    }

    fn kill_or_say_empty(&mut self) {
        self.preparing = None;
        match &mut self.part {
            Some(part) => {
                part.kill();
                self.killed_by.get_or_insert(Instant::now() + KILL_TIMEOUT);
            }
            None => self.tell(MemberMessage::Empty),
        }
    }

    /// Ends the part because it is of no use any more.
    fn end_part(&mut self, because: &str) {
        if let Some(part) = self.part.as_mut().filter(|part| !part.is_ending) {
            tracing::warn!(event = "part_ended", cause = because, "this node's part of the engine is ended");
            part.kill();
            self.killed_by = Some(Instant::now() + KILL_TIMEOUT);
        }
    }

    fn prepare(&mut self, epoch: u64) {
        let gpus = self.parts.spec.gpu_availability.clone();
        let has_part = self.part.is_some();
        self.preparing = Some((
            epoch,
            Box::pin(async move {
                if has_part {
                    return Some("the processes of the last start are still there".to_owned());
                }
                let obstacle = gpus?.check().await.err()?;
                Some(format!("{}; {}", obstacle.cause, obstacle.remedy))
            }),
        ));
    }

    fn answer_prepare(&mut self, (epoch, refusal): (u64, Option<String>)) {
        self.preparing = None;
        self.tell(MemberMessage::Prepared { epoch, setup: Box::new(self.parts.setup.clone()), refusal });
    }

    fn start(&mut self, epoch: u64, head: &str, port: u16) {
        if self.part.is_some() {
            // The head had believed that nothing was left.
            return self.end_part("the head starts another one");
        }
        match self.meeting_point(head, port).and_then(|point| Part::start(&self.parts.spec, epoch, &point)) {
            Ok(part) => {
                tracing::info!(
                    event = "part_started",
                    epoch,
                    number = self.parts.place.number,
                    "this node's part of the engine has started"
                );
                self.part = Some(part);
            }
            Err(cause) => {
                tracing::error!(event = "part_ended", cause, "this node's part of the engine is not started");
                let remedy = "mend it on that node; the start is tried again by itself".to_owned();
                let end = PartEnd { kind: "program".to_owned(), cause, remedy, is_outside_kill: true };
                self.tell(MemberMessage::Ended { epoch, end });
                self.tell(MemberMessage::Empty);
            }
        }
    }

    fn meeting_point(&self, head: &str, port: u16) -> Result<MeetingPoint, String> {
        let head = head.parse().map_err(|_| format!("the head names {head:?} as its address"))?;
        let reached_from = self.link.as_ref().map(|link| link.own_address);
        let own = match self.parts.interface.as_str() {
            "" => reached_from.ok_or("the head is not connected")?,
            interface => address_of(interface)?,
        };
        let place = &self.parts.place;
        Ok(MeetingPoint { head, port, own, interface: interface_with(own), nodes: place.nodes, number: place.number })
    }

    fn handle_part(&mut self, event: PartEvent) {
        let Some(part) = &mut self.part else { return };
        let epoch = part.epoch;
        match event {
            PartEvent::Output(lines) => self.tell(MemberMessage::Output { epoch, lines }),
            PartEvent::Ended(_) if part.is_ending => {}
            PartEvent::Ended(cause) => {
                let end = part.diagnose(cause.clone());
                tracing::error!(event = "part_ended", cause = end.cause, "this node's part of the engine has ended");
                part.is_ending = true;
                if !matches!(cause, EndCause::KeeperLost) {
                    part.kill();
                }
                self.killed_by = Some(Instant::now() + KILL_TIMEOUT);
                self.tell(MemberMessage::Ended { epoch, end });
            }
            PartEvent::Stuck(left) => {
                tracing::error!(event = "engine_stuck", ?left, "processes of the engine do not die");
                self.killed_by = Some(Instant::now() + KILL_TIMEOUT);
            }
            PartEvent::Empty => {
                (self.part, self.killed_by) = (None, None);
                self.tell(MemberMessage::Empty);
            }
        }
    }

    /// Says what the part does, and ends it when the head has been silent for too long.
    ///
    /// The head may have spoken while this program was `paused`.
    async fn beat(&mut self, paused: Duration) {
        let now = Instant::now();
        self.heard += paused;
        let silence = now.saturating_duration_since(self.heard);
        if silence >= self.parts.place.lease {
            self.end_part(&format!("nothing was heard from the head for {} s", silence.as_secs()));
        }
        if let Some(part) = self.part.as_ref().filter(|part| self.killed_by.is_some_and(|at| now >= at) && !part.is_reader_gone()) {
            tracing::error!("the engine's keeper does not answer; it is ended");
            part.end_keeper();
            self.killed_by = Some(now + KILL_TIMEOUT);
        }
        let activity = match &mut self.part {
            Some(part) => part.look().await,
            None => PartActivity::Absent,
        };
        self.tell(MemberMessage::Beat(activity));
        if self.part.as_ref().is_some_and(Part::is_keeper_silent) {
            self.handle_part(PartEvent::Ended(EndCause::KeeperSilent));
        }
    }
}

async fn next_event(part: &mut Option<Part>) -> PartEvent {
    match part {
        Some(part) => part.next().await,
        None => std::future::pending().await,
    }
}

async fn next_message(link: &mut Option<Link>) -> Option<HeadMessage> {
    match link {
        Some(link) => link.next().await,
        None => std::future::pending().await,
    }
}

async fn await_some(dial: &mut Option<AbortOnDropHandle<Result<Link, DialFailure>>>) -> Result<Link, DialFailure> {
    match dial {
        Some(task) => task.await.unwrap_or_else(|error| Err(DialFailure::Other(error.to_string()))),
        None => std::future::pending().await,
    }
}

async fn prepared(preparing: &mut Option<Preparing>) -> (u64, Option<String>) {
    match preparing {
        Some((epoch, checks)) => (*epoch, checks.await),
        None => std::future::pending().await,
    }
}
