//! Epochs from the first member to the last, and every way in which one ends.

use super::*;

const LEASE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// A head of three nodes, and the time.
struct Scene {
    roster: Roster,
    now: Instant,
    links: [u64; 3],
}

fn hello(number: u32, life: u64, epoch: Option<u64>) -> Hello {
    Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        node: format!("n{number}.7"),
        host: format!("n{number}"),
        number,
        life,
        gpus: Vec::new(),
        epoch,
    }
}

fn crash(cause: &str) -> PartEnd {
    PartEnd { kind: "gpu-memory".into(), cause: cause.into(), remedy: String::new(), is_outside_kill: false }
}

impl Scene {
    fn new() -> Self {
        let now = Instant::now();
        Self { roster: Roster::new(3, LEASE, PartSetup::default(), now), now, links: [0; 3] }
    }

    fn join(&mut self, number: u32, life: u64, epoch: Option<u64>) -> Vec<HeadMessage> {
        let (link, told) = self.roster.join(hello(number, life, epoch), self.now).unwrap();
        self.links[number as usize] = link;
        told
    }

    fn prepared(&mut self, number: u32, epoch: u64, refusal: Option<&str>) {
        let from = (number, self.links[number as usize]);
        self.roster.prepared(from, epoch, &PartSetup::default(), refusal.map(str::to_owned));
    }

    fn ended(&mut self, number: u32, epoch: u64, end: PartEnd) {
        self.roster.ended(number, self.links[number as usize], epoch, end);
    }

    fn emptied(&mut self, number: u32) -> Vec<Order> {
        self.roster.emptied(number, self.links[number as usize])
    }

    fn heard(&mut self, number: u32, activity: PartActivity) {
        self.roster.heard(number, self.links[number as usize], Some(activity), self.now);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.roster.tick(self.now);
    }

    /// Both members run their parts of epoch 5.
    fn running() -> Self {
        let mut scene = Self::new();
        scene.join(1, 11, None);
        scene.join(2, 22, None);
        scene.roster.prepare(5);
        scene.prepared(1, 5, None);
        scene.prepared(2, 5, None);
        assert_eq!(scene.roster.readiness(), Readiness::Ready);
        assert_eq!(scene.roster.start("10.0.0.1", 29_501).len(), 2);
        scene
    }
}

#[test]
fn an_epoch_starts_once_every_member_is_prepared_for_it() {
    let mut scene = Scene::new();
    scene.join(1, 11, None);
    assert_eq!(scene.roster.prepare(5), [(1, HeadMessage::Prepare { epoch: 5 })]);
    scene.prepared(1, 5, None);
    assert_eq!(scene.roster.readiness(), Readiness::Waits("waits for member 2 to join".into()));
    let told = scene.join(2, 22, None);
    assert_eq!(told[1..], [HeadMessage::Prepare { epoch: 5 }], "who joins late is asked at once");
    assert_eq!(scene.roster.readiness(), Readiness::Waits("waits for n2 to prepare".into()));
    scene.prepared(2, 4, None);
    assert!(matches!(scene.roster.readiness(), Readiness::Waits(_)), "that was another epoch's answer");
    scene.prepared(2, 5, None);
    assert_eq!(scene.roster.readiness(), Readiness::Ready);
    let start = HeadMessage::Start { epoch: 5, address: "10.0.0.1".into(), port: 29_501 };
    assert_eq!(scene.roster.start("10.0.0.1", 29_501), [(1, start.clone()), (2, start)]);
    assert_eq!(scene.roster.serve().len(), 2);
    assert_eq!(scene.roster.loss(), None);
}

#[test]
fn a_member_that_cannot_start_its_part_says_why() {
    let mut scene = Scene::new();
    scene.join(1, 11, None);
    scene.join(2, 22, None);
    scene.roster.prepare(5);
    scene.prepared(2, 5, Some("GPU 0 is in use by python (pid 7)"));
    assert_eq!(scene.roster.readiness(), Readiness::Refused("n2: GPU 0 is in use by python (pid 7)".into()));
    scene.roster.prepare(6);
    assert!(matches!(scene.roster.readiness(), Readiness::Waits(_)), "it is asked again");
}

#[test]
fn the_end_of_any_part_ends_the_epoch_with_the_first_cause() {
    let mut scene = Scene::running();
    scene.ended(2, 4, crash("of another epoch"));
    assert_eq!(scene.roster.loss(), None);
    scene.ended(2, 5, crash("CUDA out of memory"));
    scene.ended(1, 5, crash("Connection closed by peer"));
    let loss = scene.roster.loss().unwrap();
    assert_eq!((loss.host.as_str(), loss.end.cause.as_str()), ("n2", "CUDA out of memory"));
    assert_eq!(scene.roster.kill(), [(1, HeadMessage::Kill), (2, HeadMessage::Kill)]);
    assert!(!scene.roster.is_quiet());
    scene.roster.prepare(6);
    assert_eq!(scene.roster.loss(), None, "a new epoch has lost nothing");
    assert_eq!(scene.roster.readiness(), Readiness::Waits("waits for the processes on n1 to end, the processes on n2 to end".into()));
    assert_eq!(scene.emptied(1), [(1, HeadMessage::Prepare { epoch: 6 })]);
    assert_eq!(scene.emptied(2).last(), Some(&(2, HeadMessage::Prepare { epoch: 6 })));
    assert!(scene.roster.is_quiet());
}

#[test]
fn a_cause_told_after_the_heads_own_end_counts() {
    let mut scene = Scene::running();
    scene.roster.kill();
    scene.ended(1, 5, crash("CUDA out of memory"));
    assert_eq!(scene.roster.loss().unwrap().end.cause, "CUDA out of memory");
}

#[test]
fn a_silence_shorter_than_the_lease_heals() {
    let mut scene = Scene::running();
    scene.heard(2, PartActivity::Idle);
    scene.pass(40 * SECOND);
    scene.heard(2, PartActivity::Idle);
    assert_eq!(scene.roster.loss(), None);
    assert_eq!(scene.roster.activity(scene.now), FarActivity::Unknown, "nobody knows what n1 does");
    // The network is back, and the member has opened another connection.
    let old = scene.links[1];
    assert_eq!(scene.join(1, 11, Some(5)).len(), 1, "its part runs on");
    scene.roster.disconnect(1, old, scene.now);
    scene.pass(30 * SECOND);
    assert_eq!(scene.roster.loss(), None, "the old connection does not count");
}

#[test]
fn a_member_silent_for_the_lease_is_lost() {
    let mut scene = Scene::running();
    for _ in 0..60 {
        scene.heard(2, PartActivity::Computing);
        scene.pass(SECOND);
    }
    let loss = scene.roster.loss().unwrap();
    assert_eq!((loss.host.as_str(), loss.end.cause.as_str()), ("n1", "nothing was heard from n1 for 60 s"));
    assert!(loss.end.is_outside_kill, "no request did that");
}

#[test]
fn a_member_whose_connection_was_closed_has_seconds_to_come_back() {
    let mut scene = Scene::running();
    scene.roster.disconnect(1, scene.links[1], scene.now);
    scene.pass(4 * SECOND);
    assert_eq!(scene.roster.loss(), None);
    scene.join(1, 11, Some(5));
    scene.pass(4 * SECOND);
    assert_eq!(scene.roster.loss(), None);
    scene.roster.disconnect(1, scene.links[1], scene.now);
    scene.pass(5 * SECOND);
    assert!(scene.roster.loss().unwrap().end.cause.contains("the agent on n1 is gone"));
}

#[test]
fn a_head_that_leaves_waits_for_no_closed_connection() {
    let mut scene = Scene::running();
    scene.roster.stop_waiting();
    assert_eq!(scene.roster.loss(), None);
    scene.roster.disconnect(2, scene.links[2], scene.now);
    scene.roster.stop_waiting();
    assert!(scene.roster.loss().unwrap().end.cause.contains("the agent on n2 is gone"));
}

#[test]
fn an_agent_that_was_replaced_has_lost_its_part() {
    let mut scene = Scene::running();
    scene.roster.disconnect(1, scene.links[1], scene.now);
    scene.join(1, 12, None);
    assert!(scene.roster.loss().unwrap().end.cause.contains("the agent on n1 is gone"));
    scene.roster.kill();
    scene.emptied(1);
    scene.emptied(2);
    scene.roster.prepare(6);
    assert_eq!(scene.roster.loss(), None);
}

#[test]
fn a_part_of_no_epoch_is_ended_before_it_disturbs_another() {
    let mut scene = Scene::new();
    let told = scene.join(1, 11, Some(3));
    assert_eq!(told[1..], [HeadMessage::Kill], "an earlier head has left it");
    scene.roster.prepare(5);
    assert!(matches!(scene.roster.readiness(), Readiness::Waits(_)));
    assert_eq!(scene.emptied(1), [(1, HeadMessage::Prepare { epoch: 5 })]);
}

#[test]
fn two_nodes_with_one_number_are_told_apart() {
    let mut scene = Scene::new();
    scene.join(1, 11, None);
    let refused = scene.roster.join(hello(1, 99, None), scene.now).unwrap_err();
    assert!(refused.contains("member 1 is n1 already") && refused.contains("--member"), "{refused}");
    assert!(scene.roster.join(hello(3, 33, None), scene.now).unwrap_err().contains("no member 3"));
    assert!(scene.roster.join(hello(0, 33, None), scene.now).unwrap_err().contains("no member 0"));
    let old = Hello { version: "0.0.1".into(), ..hello(2, 22, None) };
    assert!(scene.roster.join(old, scene.now).unwrap_err().contains("the same program"));
    // Its host died without a word, and another one has its number now.
    scene.pass(4 * SECOND);
    scene.join(1, 99, None);
}

#[test]
fn what_the_far_parts_do_is_one_answer() {
    let mut scene = Scene::running();
    let does = |scene: &Scene| scene.roster.activity(scene.now);
    scene.heard(1, PartActivity::Idle);
    scene.heard(2, PartActivity::Idle);
    assert_eq!(does(&scene), FarActivity::Idle);
    scene.heard(2, PartActivity::Computing);
    assert_eq!(does(&scene), FarActivity::Computing);
    scene.heard(1, PartActivity::Stopped("VLLM::Worker (pid 3)".into()));
    assert_eq!(does(&scene), FarActivity::Stopped("VLLM::Worker (pid 3) on n1".into()));
}

#[test]
fn time_in_which_nothing_ran_counts_for_nobody() {
    let mut scene = Scene::running();
    scene.roster.excuse(100 * SECOND);
    scene.pass(100 * SECOND);
    assert_eq!(scene.roster.loss(), None);
}

#[test]
fn members_are_shown_with_what_they_do() {
    let mut scene = Scene::new();
    let states = |scene: &Scene| scene.roster.view(scene.now).into_iter().map(|member| member.state).collect::<Vec<_>>();
    assert_eq!(states(&scene), ["has not joined", "has not joined"]);
    scene.join(1, 11, None);
    assert_eq!(states(&scene)[0], "has no part running");
    let mut scene = Scene::running();
    assert_eq!(states(&scene), ["runs its part", "runs its part"]);
    scene.heard(1, PartActivity::Idle);
    scene.now += 4 * SECOND;
    assert_eq!(states(&scene)[0], "not heard for 4 s");
    scene.roster.disconnect(2, scene.links[2], scene.now);
    assert_eq!(states(&scene)[1], "its agent is away for 4 s");
}

#[test]
fn a_part_that_its_member_has_ended_is_lost() {
    let mut scene = Scene::running();
    scene.emptied(1);
    let loss = scene.roster.loss().unwrap();
    assert!(loss.end.cause.contains("the agent on n1 has ended its part") && loss.end.is_outside_kill, "{loss:?}");
    scene.roster.kill();
    scene.emptied(2);
    assert!(scene.roster.is_quiet());
}
