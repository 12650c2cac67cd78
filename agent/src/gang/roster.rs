//! The members of a replica over several nodes, as their head sees them: who is there, how far the
//! present epoch is, and which loss ends it.
//!
//! An epoch is one life of the engine on all nodes. The end of any part is the end of the epoch,
//! because no part can join another one's epoch (vLLM 0.33). This module is pure: it is told what
//! happens and the time, and returns what the head says to its members.

use std::time::Duration;

use tokio::time::Instant;

use super::setup::PartSetup;
use super::wire::{HeadMessage, Hello, PROTOCOL, PartActivity, PartEnd, bounded};

/// A member that has said nothing for so long is not heard any more; it says something each second.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(3);

/// Time for a member whose connection has ended to open another one.
///
/// A network that fails ends no connection before the lease is over, so this one was closed, and
/// mostly by an agent's death.
const REJOIN_GRACE: Duration = Duration::from_secs(5);

/// A message, and the number of the member that gets it.
pub(crate) type Order = (u32, HeadMessage);

/// Loss that ends an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Loss {
    /// Host of the member.
    pub(crate) host: String,
    pub(crate) end: PartEnd,
}

/// Whether an epoch may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// These members are awaited, for this reason.
    Waits(String),
    /// A member cannot start its part, or has another setup.
    Refused(String),
}

/// Activity of the parts on other nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FarActivity {
    /// A process there was stopped.
    Stopped(String),
    Computing,
    Idle,
    /// A member is not heard, so what it does is not known.
    Unknown,
}

/// A member, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberView {
    pub(crate) number: u32,
    /// Empty if it has never joined.
    pub(crate) host: String,
    pub(crate) gpus: Vec<String>,
    pub(crate) state: String,
    /// Whether its agent is heard.
    pub(crate) is_heard: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EpochStage {
    /// No part is desired.
    Down,
    Preparing,
    Running,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum MemberStage {
    /// Nothing runs there.
    Idle,
    /// The member was asked to prepare.
    Asked,
    Ready,
    Refused(String),
    Running,
    /// The member was told to kill its part.
    Ending,
}

#[derive(Debug)]
struct KnownMember {
    hello: Option<Hello>,
    /// Counts its connections; what an older one does is of no interest.
    link: u64,
    heard: Instant,
    /// When its connection ended; `None` while it has one.
    gone_since: Option<Instant>,
    stage: MemberStage,
    activity: PartActivity,
}

#[derive(Debug)]
pub(crate) struct Roster {
    /// Members from number 1 on.
    members: Vec<KnownMember>,
    lease: Duration,
    epoch: u64,
    stage: EpochStage,
    setup: PartSetup,
    loss: Option<Loss>,
}

impl Roster {
    /// The roster of a replica over `nodes` nodes, of which the head is one, before anybody has
    /// joined.
    ///
    /// `setup` is that of the head's own part. A part whose head or member is not heard for `lease`
    /// is lost.
    pub(crate) fn new(nodes: u32, lease: Duration, setup: PartSetup, now: Instant) -> Self {
        let absent = || KnownMember {
            hello: None,
            link: 0,
            heard: now,
            gone_since: Some(now),
            stage: MemberStage::Idle,
            activity: PartActivity::Absent,
        };
        let members = (1..nodes).map(|_| absent()).collect();
        Self { members, lease, epoch: 0, stage: EpochStage::Down, setup, loss: None }
    }

    /// Takes a member in that has opened a connection; returns the connection's number and what the
    /// member is told.
    ///
    /// # Errors
    /// Reason why the member is not taken in.
    pub(crate) fn join(&mut self, hello: Hello, now: Instant) -> Result<(u64, Vec<HeadMessage>), String> {
        if hello.protocol != PROTOCOL || hello.version != env!("CARGO_PKG_VERSION") {
            return Err(format!(
                "the agent on {} is hostler {} (protocol {}), and the head's is {} ({PROTOCOL}): all nodes of a replica need the same program",
                hello.host,
                hello.version,
                hello.protocol,
                env!("CARGO_PKG_VERSION")
            ));
        }
        let nodes = self.members.len() + 1;
        let number = hello.number;
        let unknown = || format!("there is no member {number}: the replica has {nodes} nodes, and the head is number 0");
        let (epoch, stage, lease) = (self.epoch, self.stage, self.lease);
        let member = self.members.get_mut((number as usize).wrapping_sub(1)).ok_or_else(unknown)?;
        let is_same_life = member.hello.as_ref().is_some_and(|known| known.life == hello.life);
        if let Some(known) = member.hello.as_ref().filter(|_| !is_same_life && member.gone_since.is_none())
            && now.saturating_duration_since(member.heard) < SILENT_AFTER
        {
            return Err(format!("member {number} is {} already: give each node a number of its own with --member", known.host));
        }
        let had_part = matches!(member.stage, MemberStage::Running);
        if had_part && !is_same_life && stage == EpochStage::Running {
            let host = member.hello.as_ref().map_or_else(|| hello.host.clone(), |known| known.host.clone());
            self.loss.get_or_insert_with(|| agent_died(&host));
        }
        let mut orders = vec![HeadMessage::Welcome { lease_ms: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX) }];
        member.stage = match hello.epoch {
            Some(running) if running == epoch && stage == EpochStage::Running => MemberStage::Running,
            Some(_) => {
                orders.push(HeadMessage::Kill);
                MemberStage::Ending
            }
            // The member's part has ended while the member was away.
            None if had_part && is_same_life && stage == EpochStage::Running => {
                self.loss.get_or_insert_with(|| agent_died(&hello.host));
                MemberStage::Idle
            }
            None if stage == EpochStage::Preparing => {
                orders.push(HeadMessage::Prepare { epoch });
                MemberStage::Asked
            }
            None => MemberStage::Idle,
        };
        (member.heard, member.gone_since) = (now, None);
        member.link += 1;
        member.hello = Some(hello);
        Ok((member.link, orders))
    }

    /// Records that a member's connection has ended.
    pub(crate) fn disconnect(&mut self, number: u32, link: u64, now: Instant) {
        if let Some(member) = self.member_of(number, link) {
            member.gone_since = Some(now);
        }
    }

    /// Begins an epoch: asks every member that has nothing running to prepare.
    pub(crate) fn prepare(&mut self, epoch: u64) -> Vec<Order> {
        (self.epoch, self.stage, self.loss) = (epoch, EpochStage::Preparing, None);
        self.ask_idle()
    }

    fn ask_idle(&mut self) -> Vec<Order> {
        let epoch = self.epoch;
        let mut orders = Vec::new();
        for (number, member) in (1..).zip(&mut self.members) {
            let is_free = matches!(member.stage, MemberStage::Idle | MemberStage::Ready | MemberStage::Refused(_) | MemberStage::Asked);
            if is_free && member.gone_since.is_none() {
                member.stage = MemberStage::Asked;
                orders.push((number, HeadMessage::Prepare { epoch }));
            }
        }
        orders
    }

    /// Records a member's answer to `Prepare`.
    pub(crate) fn prepared(&mut self, (number, link): (u32, u64), epoch: u64, setup: &PartSetup, refusal: Option<String>) {
        let is_current = self.stage == EpochStage::Preparing && epoch == self.epoch;
        let ours = self.setup.clone();
        let Some(member) = self.member_of(number, link).filter(|_| is_current) else { return };
        let host = member.host();
        let refusal = refusal.map(|reason| format!("{host}: {reason}")).or_else(|| ours.difference(setup, &host));
        member.stage = refusal.map_or(MemberStage::Ready, |reason| MemberStage::Refused(bounded(&reason)));
    }

    /// Whether the epoch may start.
    pub(crate) fn readiness(&self) -> Readiness {
        let mut awaited = Vec::new();
        for (number, member) in (1_u32..).zip(&self.members) {
            match &member.stage {
                MemberStage::Refused(reason) => return Readiness::Refused(reason.clone()),
                _ if member.gone_since.is_some() => awaited.push(match &member.hello {
                    None => format!("member {number} to join"),
                    Some(known) => format!("member {number} ({}) to come back", known.host),
                }),
                MemberStage::Ready => {}
                MemberStage::Ending => awaited.push(format!("the processes on {} to end", member.host())),
                MemberStage::Idle | MemberStage::Asked | MemberStage::Running => awaited.push(format!("{} to prepare", member.host())),
            }
        }
        if awaited.is_empty() { Readiness::Ready } else { Readiness::Waits(format!("waits for {}", awaited.join(", "))) }
    }

    /// Starts the epoch on all members. The engine's processes meet at this address.
    pub(crate) fn start(&mut self, address: &str, port: u16) -> Vec<Order> {
        self.stage = EpochStage::Running;
        let start = HeadMessage::Start { epoch: self.epoch, address: address.to_owned(), port };
        let mut orders = Vec::new();
        for (number, member) in (1..).zip(&mut self.members) {
            if member.stage == MemberStage::Ready {
                orders.push((number, start.clone()));
            } else {
                // The member has gone since it was ready.
                self.loss.get_or_insert_with(|| agent_died(&member.host()));
            }
            member.stage = MemberStage::Running;
            member.activity = PartActivity::Computing;
        }
        orders
    }

    /// Records that the engine serves.
    pub(crate) fn serve(&mut self) -> Vec<Order> {
        let running = (1..).zip(&self.members).filter(|(_, member)| member.stage == MemberStage::Running);
        running.map(|(number, _)| (number, HeadMessage::Served { epoch: self.epoch })).collect()
    }

    /// Ends the epoch everywhere.
    pub(crate) fn kill(&mut self) -> Vec<Order> {
        self.stage = EpochStage::Down;
        let mut orders = Vec::new();
        for (number, member) in (1..).zip(&mut self.members) {
            match member.stage {
                MemberStage::Running => {
                    member.stage = MemberStage::Ending;
                    orders.push((number, HeadMessage::Kill));
                }
                MemberStage::Asked | MemberStage::Ready | MemberStage::Refused(_) => member.stage = MemberStage::Idle,
                MemberStage::Idle | MemberStage::Ending => {}
            }
        }
        orders
    }

    /// Records the end of a member's part.
    ///
    /// The member's word also counts after the head's own part has ended: the head often notices
    /// first, and knows less.
    pub(crate) fn ended(&mut self, number: u32, link: u64, epoch: u64, end: PartEnd) {
        let is_current = epoch == self.epoch;
        let Some(member) = self.member_of(number, link).filter(|_| is_current) else { return };
        let loss = Loss { host: member.host(), end };
        self.loss.get_or_insert(loss);
    }

    /// Records that nothing is left on a member's node, which loses an epoch that runs.
    ///
    /// If an epoch is being prepared, the member takes part.
    pub(crate) fn emptied(&mut self, number: u32, link: u64) -> Vec<Order> {
        let Some(member) = self.member_of(number, link) else { return Vec::new() };
        member.activity = PartActivity::Absent;
        let host = member.host();
        if !matches!(member.stage, MemberStage::Ending | MemberStage::Running) {
            return Vec::new();
        }
        let was_running = std::mem::replace(&mut member.stage, MemberStage::Idle) == MemberStage::Running;
        if was_running && self.stage == EpochStage::Running {
            self.loss.get_or_insert_with(|| part_ended(&host));
        }
        if self.stage == EpochStage::Preparing { self.ask_idle() } else { Vec::new() }
    }

    /// Records that a member was heard, and what its part does.
    pub(crate) fn heard(&mut self, number: u32, link: u64, activity: Option<PartActivity>, now: Instant) {
        if let Some(member) = self.member_of(number, link) {
            member.heard = now;
            member.activity = activity.unwrap_or_else(|| member.activity.clone());
        }
    }

    /// Finds members that are lost because they have not been heard for too long.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.stage != EpochStage::Running {
            return;
        }
        let lease = self.lease;
        let lost = self.members.iter().find_map(|member| {
            let silence = now.saturating_duration_since(member.heard);
            let gone = member.gone_since.map(|since| now.saturating_duration_since(since));
            match gone {
                Some(gone) if gone >= REJOIN_GRACE => Some(agent_died(&member.host())),
                _ if silence >= lease => Some(silent(&member.host(), silence)),
                _ => None,
            }
        });
        self.loss = self.loss.take().or(lost);
    }

    /// Takes members whose connection has ended for lost at once, because the head leaves.
    ///
    /// A job often ends because of a member's agent, whose end is then the cause to show.
    pub(crate) fn stop_waiting(&mut self) {
        if self.stage == EpochStage::Running {
            let gone = self.members.iter().find(|member| member.gone_since.is_some());
            self.loss = self.loss.take().or_else(|| gone.map(|member| agent_died(&member.host())));
        }
    }

    /// Adds time to what members have, because neither this program nor its clock ran.
    pub(crate) fn excuse(&mut self, paused: Duration) {
        for member in &mut self.members {
            member.heard += paused;
            member.gone_since = member.gone_since.map(|since| since + paused);
        }
    }

    /// Loss of the present epoch, or of the last one.
    pub(crate) fn loss(&self) -> Option<&Loss> {
        self.loss.as_ref()
    }

    /// Whether an epoch runs.
    pub(crate) fn is_running(&self) -> bool {
        self.stage == EpochStage::Running
    }

    /// Whether no member that is connected has processes.
    pub(crate) fn is_quiet(&self) -> bool {
        self.members.iter().all(|member| member.gone_since.is_some() || !matches!(member.stage, MemberStage::Running | MemberStage::Ending))
    }

    /// Activity of the parts on other nodes.
    pub(crate) fn activity(&self, now: Instant) -> FarActivity {
        let mut whole = FarActivity::Idle;
        for member in &self.members {
            let is_heard = member.is_heard(now);
            match (&member.activity, is_heard) {
                (PartActivity::Stopped(process), true) => return FarActivity::Stopped(format!("{process} on {}", member.host())),
                (PartActivity::Computing, true) => whole = FarActivity::Computing,
                (PartActivity::Idle | PartActivity::Absent, true) => {}
                (_, false) if whole == FarActivity::Idle => whole = FarActivity::Unknown,
                (_, false) => {}
            }
        }
        whole
    }

    /// Whether a member is not heard.
    pub(crate) fn is_cut_off(&self, now: Instant) -> bool {
        self.members.iter().any(|member| !member.is_heard(now))
    }

    /// Members for people, in the order of their numbers.
    pub(crate) fn view(&self, now: Instant) -> Vec<MemberView> {
        let view = |(number, member): (u32, &KnownMember)| {
            let silence = now.saturating_duration_since(member.heard);
            let state = match (&member.stage, &member.hello) {
                (_, None) => "has not joined".to_owned(),
                (_, Some(_)) if member.gone_since.is_some() => format!("its agent is away for {} s", silence.as_secs()),
                (_, Some(_)) if silence >= SILENT_AFTER => format!("not heard for {} s", silence.as_secs()),
                (MemberStage::Idle | MemberStage::Asked, _) => "has no part running".to_owned(),
                (MemberStage::Ready, _) => "ready to start its part".to_owned(),
                (MemberStage::Refused(reason), _) => reason.clone(),
                (MemberStage::Running, _) => "runs its part".to_owned(),
                (MemberStage::Ending, _) => "ends its part".to_owned(),
            };
            let (host, gpus) = member.hello.as_ref().map(|known| (known.host.clone(), known.gpus.clone())).unwrap_or_default();
            let is_heard = member.is_heard(now);
            MemberView { number, host, gpus, state, is_heard }
        };
        (1..).zip(&self.members).map(view).collect()
    }

    fn member_of(&mut self, number: u32, link: u64) -> Option<&mut KnownMember> {
        self.members.get_mut((number as usize).checked_sub(1)?).filter(|member| member.link == link)
    }
}

impl KnownMember {
    fn is_heard(&self, now: Instant) -> bool {
        self.gone_since.is_none() && now.saturating_duration_since(self.heard) < SILENT_AFTER
    }

    fn host(&self) -> String {
        self.hello.as_ref().map(|known| known.host.clone()).unwrap_or_default()
    }
}

fn part_ended(host: &str) -> Loss {
    let cause = format!("the agent on {host} has ended its part of the engine");
    lost(host, cause, "that agent's log says why; the replica starts again by itself")
}

fn agent_died(host: &str) -> Loss {
    let cause = format!("the agent on {host} is gone, and its part of the engine with it");
    lost(host, cause, "look at that agent's log; the replica starts again once it is back")
}

fn silent(host: &str, silence: Duration) -> Loss {
    let cause = format!("nothing was heard from {host} for {} s", silence.as_secs());
    lost(host, cause, "look whether that node lives and reaches the head's")
}

/// Loss of a whole member, which no request is to blame for.
fn lost(host: &str, cause: String, remedy: &str) -> Loss {
    let end = PartEnd { kind: "member".to_owned(), cause, remedy: remedy.to_owned(), is_outside_kill: true };
    Loss { host: host.to_owned(), end }
}

#[cfg(test)]
mod tests;
