//! Actions of a batch system on a job: it signals every process of the agent's session, to end
//! them, to suspend them, to kill them.

use std::path::PathBuf;
use tokio::time::Instant;

use rustix::process::Signal;

use crate::harness::{Answering, CHAT, Endpoint, Program, Scene, Seen, Workplace, chat, chat_stream, is_alive, until};
use crate::harness::{session_of, signal, signal_group, signal_session, state_of};

/// Processes of this place that are in another session than the job: keepers and engines.
fn outside(scene: &Scene, job: &Program) -> Vec<u32> {
    scene.place.processes().into_iter().filter(|pid| session_of(*pid) != Some(job.pid())).collect()
}

/// Opens this many streams, and waits until each has begun.
async fn streams(scene: &Scene, count: usize, tokens: usize) -> Vec<Answering> {
    let mut streams = Vec::new();
    for _ in 0..count {
        let mut stream = scene.router.edge().open(CHAT, &chat_stream(tokens)).await;
        stream.events(2).await;
        streams.push(stream);
    }
    streams
}

async fn until_stopped(engines: &[u32], stopped: bool) {
    until(&format!("engines stopped: {stopped}"), async || {
        let states: Vec<_> = engines.iter().map(|pid| state_of(*pid)).collect();
        if states.iter().all(|state| (*state == Some('T')) == stopped) { Ok(()) } else { Err(format!("{states:?}")) }
    })
    .await;
}

fn pids(replicas: &[Seen]) -> Vec<u32> {
    replicas.iter().map(|replica| replica.pid).collect()
}

fn assert_same_lives(before: &[Seen], after: &[Seen]) {
    let lives = |replicas: &[Seen]| replicas.iter().map(|replica| (replica.pid, replica.epoch, replica.restarts)).collect::<Vec<_>>();
    assert_eq!(lives(before), lives(after));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sigterm_to_the_whole_session_lets_every_stream_finish() {
    let scene = Scene::new().await;
    let mut job = scene.job("agent", "2", &[]);
    scene.ready(2).await;
    assert_eq!(outside(&scene, &job).len(), 4, "two keepers and two engines");
    let streams = streams(&scene, 20, 200).await;
    signal_session(job.pid(), Signal::TERM);
    for stream in streams {
        stream.finish().await.assert_whole_stream();
    }
    assert!(job.ended().await.success(), "{}", job.stderr());
    scene.until_no_process_is_left().await;
    assert_eq!(scene.place.left(), Vec::<PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_ctrl_c_at_a_terminal_drains() {
    let place = Workplace::new();
    let options = ["--engine", "simulated", "--replicas", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let engine = ["--", "--sim-start-ms", "50", "--sim-step-ms", "10"];
    let mut up = place.start_session("up", &[&["up"], &options[..], &engine].concat());
    let edge = Endpoint::Tcp(up.address("edge").await);
    up.line("ready").await;
    let mut stream = edge.open(CHAT, &chat_stream(100)).await;
    stream.events(2).await;
    // A terminal signals the process group in its foreground.
    signal_group(up.pid(), Signal::INT);
    stream.finish().await.assert_whole_stream();
    assert!(up.ended().await.success(), "{}", up.stderr());
    assert_eq!(place.processes(), Vec::<u32>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keeper_ignores_sigterm_while_its_agent_lives() {
    let scene = Scene::new().await;
    let job = scene.job("agent", "1", &[]);
    let engines = pids(&scene.ready(1).await);
    let streams = streams(&scene, 1, 100).await;
    let keepers: Vec<u32> = outside(&scene, &job).into_iter().filter(|pid| !engines.contains(pid)).collect();
    assert_eq!(keepers.len(), 1);
    for ending in [Signal::TERM, Signal::INT, Signal::HUP] {
        signal(keepers[0], ending);
    }
    for stream in streams {
        stream.finish().await.assert_whole_stream();
    }
    assert!(is_alive(keepers[0]) && is_alive(engines[0]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_survives_a_killed_session() {
    let scene = Scene::new().await;
    let job = scene.job("agent", "2", &[]);
    scene.ready(2).await;
    let streams = streams(&scene, 20, 5_000).await;
    signal_session(job.pid(), Signal::KILL);
    let killed = Instant::now();
    scene.until_no_process_is_left().await;
    println!("no process left after {:?}", killed.elapsed());
    for stream in streams {
        stream.finish().await.assert_broken_stream();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_are_suspended_and_continued_with_their_agent() {
    let scene = Scene::new().await;
    let job = scene.job("agent", "2", &[]);
    let before = scene.ready(2).await;
    let streams = streams(&scene, 10, 100).await;
    signal_session(job.pid(), Signal::STOP);
    let suspended = Instant::now();
    until_stopped(&pids(&before), true).await;
    println!("engines stopped after {:?}", suspended.elapsed());
    signal_session(job.pid(), Signal::CONT);
    for stream in streams {
        stream.finish().await.assert_whole_stream();
    }
    assert_same_lives(&before, &scene.ready(2).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_suspended_job_loses_streams_and_keeps_its_engine() {
    let scene = Scene::new().await;
    let job = scene.job("agent", "1", &[]);
    let before = scene.ready(1).await;
    let streams = streams(&scene, 4, 3_000).await;
    signal_session(job.pid(), Signal::STOP);
    for stream in streams {
        let broken = stream.finish().await;
        broken.assert_broken_stream();
        let text = broken.text();
        assert!(text.contains("was silent for") && text.contains("suspended"), "{text}");
    }
    signal_session(job.pid(), Signal::CONT);
    let heard = |replicas: &[Seen]| replicas.iter().all(|replica| replica.is_ready() && !replica.suspect);
    scene.until_replicas("the job serves again", heard).await;
    assert_eq!(scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
    assert_same_lives(&before, &scene.ready(1).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_survives_a_job_killed_while_suspended() {
    let scene = Scene::new().await;
    let job = scene.job("agent", "1", &[]);
    let engines = pids(&scene.ready(1).await);
    signal_session(job.pid(), Signal::STOP);
    until_stopped(&engines, true).await;
    signal_session(job.pid(), Signal::KILL);
    scene.until_no_process_is_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_engine_survives_its_suspended_agents_kill() {
    let scene = Scene::new().await;
    let keep = ["--if-agent-dies", "keep"];
    let mut job = scene.job("agent", "1", &keep);
    let before = scene.ready(1).await.remove(0);
    signal_session(job.pid(), Signal::STOP);
    until_stopped(&[before.pid], true).await;
    signal_session(job.pid(), Signal::KILL);
    job.ended().await;
    until_stopped(&[before.pid], false).await;

    let next = scene.job("next", "1", &keep);
    let heard = |replicas: &[Seen]| replicas.iter().all(|now| now.is_ready() && !now.suspect);
    let after = scene.until_replicas("the next agent has it", heard).await.remove(0);
    assert_eq!((after.pid, after.epoch), (before.pid, before.epoch));
    // The next agent is watched as the first was.
    signal_session(next.pid(), Signal::STOP);
    until_stopped(&[before.pid], true).await;
    signal_session(next.pid(), Signal::CONT);
    until_stopped(&[before.pid], false).await;
    assert_eq!(scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
}
