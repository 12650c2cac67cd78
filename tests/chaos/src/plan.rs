//! Plan of faults and their times, from a seed alone: equal seeds give equal plans.
//!
//! Pure; `faults` executes the plan.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

pub(crate) const ROUTERS: usize = 2;

pub(crate) const AGENTS: usize = 3;

pub(crate) const ENGINES: usize = 2;

/// Most agents with a fault at the same time: the fleet should be disturbed, but not be away.
const AGENTS_AT_ONCE: usize = 2;

/// Time before the first fault, so that the load has begun.
const FIRST: Duration = Duration::from_secs(2);

/// Time at the end in which no fault begins.
const QUIET: Duration = Duration::from_secs(4);

/// An engine, by the number of its agent and its own number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Engine(pub(crate) usize, pub(crate) usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    KillEngine(Engine),
    TermEngine(Engine),
    /// The engine is stopped for this long, then continued.
    StopEngine(Engine, Duration),
    /// The agent is killed, and started again after this long.
    KillAgent(usize, Duration),
    TermAgent(usize, Duration),
    StopAgent(usize, Duration),
    KillRouter(usize, Duration),
    TermRouter(usize, Duration),
    StopRouter(usize, Duration),
    /// An operator of a router drains the engine, and releases it after this long.
    Drain(usize, Engine, Duration),
    Restart(usize, Engine),
    /// All engines restart, one after another.
    RollingRestart(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    pub(crate) fault: Fault,
}

/// Faults for a run of this `length`.
pub(crate) fn plan(seed: u64, length: Duration) -> Vec<Step> {
    let mut random = Rng::with_seed(seed);
    let mut busy = Occupancy::default();
    let mut steps = Vec::new();
    let mut at = FIRST;
    while at + QUIET < length {
        let fault = draw(&mut random);
        if busy.take(fault, at) {
            steps.push(Step { at, fault });
            at += milliseconds(&mut random, 200, 1500);
        } else {
            at += Duration::from_millis(50);
        }
    }
    steps
}

fn draw(random: &mut Rng) -> Fault {
    let engine = Engine(random.usize(..AGENTS), random.usize(..ENGINES));
    let (agent, router) = (random.usize(..AGENTS), random.usize(..ROUTERS));
    match random.u8(..100) {
        0..22 => Fault::KillEngine(engine),
        22..30 => Fault::TermEngine(engine),
        30..44 => Fault::StopEngine(engine, milliseconds(random, 200, 6000)),
        44..52 => Fault::KillAgent(agent, milliseconds(random, 100, 3000)),
        52..57 => Fault::TermAgent(agent, milliseconds(random, 100, 1000)),
        57..69 => Fault::StopAgent(agent, milliseconds(random, 200, 9000)),
        69..74 => Fault::KillRouter(router, milliseconds(random, 100, 2000)),
        74..78 => Fault::TermRouter(router, milliseconds(random, 100, 1000)),
        78..83 => Fault::StopRouter(router, milliseconds(random, 200, 4000)),
        83..91 => Fault::Drain(router, engine, milliseconds(random, 1000, 5000)),
        91..98 => Fault::Restart(router, engine),
        _ => Fault::RollingRestart(router),
    }
}

fn milliseconds(random: &mut Rng, least: u64, most: u64) -> Duration {
    Duration::from_millis(random.u64(least..=most))
}

/// Ends of the faults that occupy each part of the fleet.
#[derive(Debug, Default)]
struct Occupancy {
    engines: [[Duration; ENGINES]; AGENTS],
    agents: [Duration; AGENTS],
    router: Duration,
    rolling: Duration,
}

impl Occupancy {
    /// Occupies the part that the fault hits, if it is free.
    fn take(&mut self, fault: Fault, at: Duration) -> bool {
        let until = at + lasts(fault);
        match fault {
            Fault::KillEngine(engine)
            | Fault::TermEngine(engine)
            | Fault::StopEngine(engine, _)
            | Fault::Drain(_, engine, _)
            | Fault::Restart(_, engine) => claim(&mut self.engines[engine.0][engine.1], at, until),
            Fault::KillAgent(agent, _) | Fault::TermAgent(agent, _) | Fault::StopAgent(agent, _) => {
                let others = self.agents.iter().filter(|busy| **busy > at).count();
                others < AGENTS_AT_ONCE && claim(&mut self.agents[agent], at, until)
            }
            Fault::KillRouter(..) | Fault::TermRouter(..) | Fault::StopRouter(..) => claim(&mut self.router, at, until),
            Fault::RollingRestart(_) => claim(&mut self.rolling, at, until),
        }
    }
}

fn claim(busy: &mut Duration, at: Duration, until: Duration) -> bool {
    let free = *busy <= at;
    if free {
        *busy = until;
    }
    free
}

/// How long no other fault hits the part after that.
fn lasts(fault: Fault) -> Duration {
    match fault {
        Fault::KillEngine(_) | Fault::TermEngine(_) => Duration::from_secs(3),
        Fault::StopEngine(_, stopped) => stopped + Duration::from_secs(2),
        Fault::KillAgent(_, away) | Fault::KillRouter(_, away) => away + Duration::from_secs(4),
        Fault::TermAgent(_, away) | Fault::TermRouter(_, away) => away + Duration::from_secs(8),
        Fault::StopAgent(_, stopped) | Fault::StopRouter(_, stopped) => stopped + Duration::from_secs(3),
        Fault::Drain(_, _, drained) => drained + Duration::from_secs(3),
        Fault::Restart(..) => Duration::from_secs(5),
        Fault::RollingRestart(_) => Duration::from_secs(40),
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "n{}/{}", self.0, self.1)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:6.2} s  {:?}", self.at.as_secs_f64(), self.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_secs(180);

    #[test]
    fn a_seed_reproduces_its_plan() {
        assert_eq!(plan(7, LENGTH), plan(7, LENGTH));
        assert_ne!(plan(7, LENGTH), plan(8, LENGTH));
    }

    #[test]
    fn one_router_and_one_agent_are_always_spared() {
        for seed in 0..50 {
            let steps = plan(seed, LENGTH);
            assert!(steps.len() > 80, "seed {seed}: {} steps", steps.len());
            for (index, step) in steps.iter().enumerate() {
                let under_way = |is: &dyn Fn(&Fault) -> bool| {
                    let before = steps[..=index].iter().filter(|other| is(&other.fault) && other.at + lasts(other.fault) > step.at);
                    before.count()
                };
                let of_routers = |fault: &Fault| matches!(fault, Fault::KillRouter(..) | Fault::TermRouter(..) | Fault::StopRouter(..));
                let of_agents = |fault: &Fault| matches!(fault, Fault::KillAgent(..) | Fault::TermAgent(..) | Fault::StopAgent(..));
                assert!(under_way(&of_routers) <= 1 && under_way(&of_agents) <= AGENTS_AT_ONCE, "seed {seed}: {step}");
            }
        }
    }

    #[test]
    fn a_plan_of_minutes_contains_every_fault() {
        let steps = plan(1, 4 * LENGTH);
        let kinds: std::collections::HashSet<_> = steps.iter().map(|step| std::mem::discriminant(&step.fault)).collect();
        assert_eq!(kinds.len(), 12);
    }
}
