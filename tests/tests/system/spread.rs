//! A replica over two nodes: one agent is its head, the other a member, each with a part of the
//! engine as a process.

use std::time::Duration;

use hostler_proto::agent::v1::Phase;
use hostler_router::RouterConfig;
use hostler_tls::{Authority, TokenScope, TokenStore, UseLimit};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{
    CHAT, Program, RunningRouter, Scene, Seen, Workplace, chat, chat_stream, kill_group, signal, signal_group, soon, until,
};

/// Head and member of one replica, `n0/0`.
struct Spread {
    scene: Scene,
    head: Program,
    member: Program,
}

impl Spread {
    async fn start(flags: &[&str]) -> Self {
        let scene = Scene::new().await;
        let head = part(&scene, "head", 0, flags);
        let member = part(&scene, "member", 1, flags);
        let spread = Self { scene, head, member };
        spread.scene.ready(1).await;
        spread
    }

    /// Process of the part that has this argument.
    fn part_with(&self, argument: &str) -> u32 {
        let of = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_part =
            |pid: &u32| of(pid).split('\0').skip(1).take(2).eq(["sim", "engine"]) && of(pid).split('\0').any(|word| word == argument);
        let found: Vec<u32> = self.scene.place.processes().into_iter().filter(is_part).collect();
        assert_eq!(found.len(), 1, "{argument}: {found:?}");
        found[0]
    }

    fn near(&self) -> u32 {
        self.part_with("--uds")
    }

    fn far(&self) -> u32 {
        self.part_with("--headless")
    }

    async fn replica(&self) -> Seen {
        self.scene.admin().replica("n0/0").await
    }

    /// Waits until another epoch serves than this one.
    async fn until_served_anew(&self, epoch: u64) {
        self.scene.until_replicas("another epoch", |replicas| replicas.iter().any(|it| it.is_ready() && it.epoch != epoch)).await;
    }

    async fn until_reason(&self, words: &str) -> Seen {
        let seen = self.scene.until_replicas(words, |replicas| replicas.iter().any(|replica| replica.reason.contains(words))).await;
        seen.into_iter().next().unwrap()
    }

    /// Loses a part in the middle of a stream, which goes on in the next epoch.
    async fn goes_on_after(&self, lose: impl FnOnce(&Self), words: &str) {
        let epoch = self.replica().await.epoch;
        let parts = [self.near(), self.far()];
        let mut stream = self.scene.router.edge().open(CHAT, &chat_stream(400)).await;
        stream.events(3).await;
        lose(self);
        self.until_reason(words).await;
        self.until_served_anew(epoch).await;
        stream.finish().await.assert_whole_stream();
        for lost in parts {
            assert!(![self.near(), self.far()].contains(&lost), "both parts are of the new epoch");
        }
    }
}

fn part(scene: &Scene, name: &str, number: u32, flags: &[&str]) -> Program {
    part_in(scene, name, number, &format!("r{number}"), flags)
}

/// A part whose run directory is `r7`, say, and its node `n7`.
fn part_in(scene: &Scene, name: &str, number: u32, place: &str, flags: &[&str]) -> Program {
    let (router, node, number) = (scene.router.agents.to_string(), place.replace('r', "n"), number.to_string());
    let (file, run_dir) = (scene.place.path().join("head.json"), scene.place.path().join(place));
    let (file, run_dir) = (file.to_str().unwrap(), run_dir.to_str().unwrap());
    let mut arguments = vec!["agent", "--router", &router, "--node", &node, "--engine", "simulated", "--run-dir", run_dir];
    arguments.extend(["--nodes-per-replica", "2", "--head-file", file, "--member", &number]);
    arguments.extend(flags);
    if !flags.contains(&"--") {
        arguments.push("--");
    }
    arguments.extend(["--sim-start-ms", "50", "--sim-step-ms", "10"]);
    scene.place.start(name, &arguments)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_over_two_nodes_serves_and_leaves_nothing_on_either() {
    let mut spread = Spread::start(&[]).await;
    let edge = spread.scene.router.edge();
    assert_eq!(edge.post(CHAT, &chat(3)).await.status, 200);
    spread.scene.until_replicas("its cache known exactly", |replicas| replicas.iter().all(|replica| replica.cache.exact)).await;
    let mut stream = edge.open(CHAT, &chat_stream(50)).await;
    stream.events(2).await;
    spread.head.signal(Signal::TERM);
    stream.finish().await.assert_whole_stream();
    assert!(spread.head.ended().await.success(), "{}", spread.head.stderr());
    assert!(spread.member.ended().await.success(), "{}", spread.member.stderr());
    spread.scene.until_no_process_is_left().await;
    assert!(!spread.scene.place.path().join("head.json").exists(), "nobody listens there any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_whichever_part_of_its_engine_is_killed() {
    let spread = Spread::start(&[]).await;
    spread.goes_on_after(|spread| kill_group(spread.far()), "was killed while it served").await;
    spread.goes_on_after(|spread| kill_group(spread.near()), "SIGKILL").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_engine_that_loses_a_part_starts_anew_at_once() {
    let spread = Spread::start(&[]).await;
    let epoch = spread.replica().await.epoch;
    kill_group(spread.far());
    spread.until_served_anew(epoch).await;
    assert_eq!(spread.scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_is_stopped_is_found_by_the_head() {
    let spread = Spread::start(&["--stall-timeout", "1s"]).await;
    spread.goes_on_after(|spread| signal_group(spread.far(), Signal::STOP), "is stopped").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_stop_of_a_part_only_makes_the_stream_wait() {
    let spread = Spread::start(&[]).await;
    let epoch = spread.replica().await.epoch;
    let mut stream = spread.scene.router.edge().open(CHAT, &chat_stream(100)).await;
    stream.events(3).await;
    signal_group(spread.far(), Signal::STOP);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    signal_group(spread.far(), Signal::CONT);
    stream.finish().await.assert_whole_stream();
    assert_eq!(spread.replica().await.epoch, epoch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_agent_takes_both_parts_along_and_another_one_brings_them_back() {
    let mut spread = Spread::start(&[]).await;
    let (near, far) = (spread.near(), spread.far());
    spread.member.signal(Signal::KILL);
    spread.member.ended().await;
    spread.until_reason("is gone").await;
    until("nothing left of either part", async || {
        let left: Vec<u32> = spread.scene.place.processes().into_iter().filter(|pid| [near, far].contains(pid)).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    spread.until_reason("waits for member 1").await;
    spread.member = part(&spread.scene, "member2", 1, &[]);
    spread.scene.ready(1).await;

    let far = spread.far();
    spread.head.signal(Signal::KILL);
    spread.head.ended().await;
    until("nothing left of the part whose head is gone", async || {
        if spread.scene.place.processes().contains(&far) { Err(format!("{far} lives")) } else { Ok(()) }
    })
    .await;
    spread.head = part(&spread.scene, "head2", 0, &[]);
    spread.scene.until_replicas("ready under another head", |replicas| replicas.iter().any(Seen::is_ready)).await;
    assert_eq!(spread.scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_ends_with_a_members_agent_says_so() {
    let mut scene = Scene::new().await;
    scene.place.environment.push(("PBS_JOBID", "12.head"));
    let [mut head, member] = [("head", 0), ("member", 1)].map(|(name, number)| part(&scene, name, number, &[]));
    scene.ready(1).await;
    member.signal(Signal::KILL);
    until("the head sees it go", async || if head.stderr().contains("member_left") { Ok(()) } else { Err(head.stderr()) }).await;
    // What the job's script does on PBS, and srun on Slurm.
    head.signal(Signal::TERM);
    assert!(head.ended().await.success(), "{}", head.stderr());
    let socket = scene.admin().socket();
    until("the job's end with its reason", async || {
        let shown = scene.place.run(&["ps", "--admin", socket]).await.stdout;
        if shown.contains("drained; n0/0: the agent on") { Ok(()) } else { Err(shown) }
    })
    .await;
    scene.until_no_process_is_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_told_to_leave_takes_the_replica_along_after_its_answers() {
    a_member_takes_the_replica_along(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_a_scheduler_will_kill_takes_the_replica_along_too() {
    a_member_takes_the_replica_along(&["--leave-grace", "20s"]).await;
}

async fn a_member_takes_the_replica_along(flags: &[&str]) {
    let mut spread = Spread::start(flags).await;
    let mut stream = spread.scene.router.edge().open(CHAT, &chat_stream(100)).await;
    stream.events(2).await;
    spread.member.signal(Signal::TERM);
    stream.finish().await.assert_whole_stream();
    assert!(spread.member.ended().await.success(), "{}", spread.member.stderr());
    assert!(spread.head.ended().await.success(), "{}", spread.head.stderr());
    spread.scene.until_no_process_is_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_a_fleet_show_their_certificates_to_each_other() {
    let place = Workplace::new();
    let fleet = place.path().join("fleet");
    let authority = Authority::create(&fleet, "f").unwrap();
    let scope = TokenScope::new(Duration::from_secs(600), UseLimit::Count(2));
    let token = TokenStore::in_folder(&fleet).create(&authority, &scope, hostler_tls::now()).unwrap();
    let file = place.path().join("token");
    hostler_tls::write_private(&file, token.text().as_bytes()).unwrap();
    let local = || "127.0.0.1:0".to_owned();
    let config = RouterConfig {
        listen: local(),
        agents_listen: local(),
        admin_listen: local(),
        tls_dir: fleet,
        cache_dir: place.path().join("caches"),
        operators_socket: place.path().join("o.sock"),
        ..RouterConfig::default()
    };
    let scene = Scene { place, router: RunningRouter::start(config).await };
    let (file, identities) = (file.to_str().unwrap().to_owned(), scene.place.path().join("identities"));
    let flags = ["--join-token-file", &file, "--identity-dir", identities.to_str().unwrap()];
    let _head = part(&scene, "head", 0, &flags);
    let _member = part(&scene, "member", 1, &flags);
    scene.ready(1).await;
    // Somebody else's connection is closed, and the replica does not notice.
    let head = std::fs::read_to_string(scene.place.path().join("head.json")).unwrap();
    let address = serde_json::from_str::<serde_json::Value>(&head).unwrap()["head"].as_str().unwrap().to_owned();
    let mut stranger = tokio::net::TcpStream::connect(address).await.unwrap();
    stranger.write_all(b"\0\0\0\x0a{\"Beat\": 1}").await.unwrap();
    let mut answer = Vec::new();
    let _ = soon("the end of a stranger's connection", stranger.read_to_end(&mut answer)).await;
    assert!(scene.router.edge().post(CHAT, &chat(3)).await.status == 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_other_arguments_are_told_the_difference() {
    let scene = Scene::new().await;
    let _head = part(&scene, "head", 0, &["--", "--max-model-len", "8192"]);
    let mut member = part(&scene, "member", 1, &["--", "--max-model-len", "4096"]);
    let refused = |replica: &Seen| {
        replica.phase == Phase::Failed && replica.reason.contains("4096 on") && replica.reason.contains("8192 on the head")
    };
    scene.until_replicas("the difference", |replicas| replicas.iter().any(refused)).await;
    // The head stays while the member is stopped and started with what was wrong.
    member.signal(Signal::TERM);
    assert!(member.ended().await.success(), "{}", member.stderr());
    let _mended = part(&scene, "mended", 1, &["--", "--max-model-len", "8192"]);
    scene.ready(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_node_with_the_same_number_is_refused_and_gives_up() {
    let spread = Spread::start(&[]).await;
    let router = spread.scene.router.agents.to_string();
    let (file, run_dir) = (spread.scene.place.path().join("head.json"), spread.scene.place.path().join("r9"));
    let mut second = spread.scene.place.start(
        "second",
        &[
            "agent",
            "--router",
            &router,
            "--node",
            "n9",
            "--engine",
            "simulated",
            "--run-dir",
            run_dir.to_str().unwrap(),
            "--nodes-per-replica",
            "2",
            "--head-file",
            file.to_str().unwrap(),
            "--member",
            "1",
            "--attach-timeout",
            "1s",
            "--",
            "--sim-start-ms",
            "50",
            "--sim-step-ms",
            "10",
        ],
    );
    assert_eq!(second.ended().await.code(), Some(3), "{}", second.stderr());
    assert!(second.stderr().contains("give each node a number of its own"), "{}", second.stderr());
    assert!(spread.replica().await.is_ready());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_whose_number_another_node_has_taken_ends_its_part() {
    let spread = Spread::start(&[]).await;
    let far = spread.far();
    spread.member.signal(Signal::STOP);
    let _other = part_in(&spread.scene, "other", 1, "r7", &[]);
    until("the other node's part", async || {
        let epoch = spread.replica().await;
        if epoch.is_ready() && epoch.restarts > 0 { Ok(()) } else { Err(format!("{epoch:?}")) }
    })
    .await;
    spread.member.signal(Signal::CONT);
    until("nothing left of the part that nobody wants", async || {
        if spread.scene.place.processes().contains(&far) { Err(format!("{far} lives")) } else { Ok(()) }
    })
    .await;
    assert!(spread.member.stderr().contains("does not take this node in"), "{}", spread.member.stderr());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_dies_under_a_stopped_keeper_is_missed() {
    let spread = Spread::start(&[]).await;
    let epoch = spread.replica().await.epoch;
    let far = spread.far();
    let keeper = parent_of(far);
    signal(keeper, Signal::STOP);
    signal(far, Signal::KILL);
    spread.until_reason("keeper did not answer").await;
    spread.until_served_anew(epoch).await;
    assert!(!spread.scene.place.processes().contains(&keeper), "the keeper was ended too");
}

fn parent_of(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_keep_no_member_away() {
    let scene = Scene::new().await;
    let _head = part(&scene, "head", 0, &[]);
    let file = scene.place.path().join("head.json");
    let address = until("the head's address", async || {
        let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
        serde_json::from_str::<serde_json::Value>(&text)
            .map(|head| head["head"].as_str().unwrap().to_owned())
            .map_err(|error| error.to_string())
    })
    .await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(tokio::net::TcpStream::connect(&address).await.unwrap());
    }
    let _member = part(&scene, "member", 1, &[]);
    scene.ready(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_of_one_node_are_shown_alone() {
    let spread = Spread::start(&[]).await;
    let admin = spread.scene.admin().socket().to_owned();
    let logs = async |more: &[&str]| spread.scene.place.run(&[&["logs", "n0/0", "--admin", &admin], more].concat()).await;
    let far = logs(&["--member", "1", "-n", "2"]).await;
    assert!(far.success && far.stdout.lines().count() == 2, "{}{}", far.stdout, far.stderr);
    assert!(far.stdout.lines().all(|line| line.starts_with('(')), "{}", far.stdout);
    let near = logs(&["--member", "0"]).await.stdout;
    assert!(near.contains("startup complete") && !far.stdout.lines().any(|line| near.contains(line)), "{near}");
    let refused = logs(&["--member", "2"]).await;
    assert_eq!(
        (refused.success, refused.stderr.as_str()),
        (false, "error: there is no member 2: the replica's nodes are 0, the head, to 1\n")
    );
}
