//! Fate of engines when their agent, or the keeper between the two, is killed.
//!
//! Depending on the setting, nothing is left of them, or they continue under the next agent.

use std::fs;
use std::time::Duration;

use tokio::time::Instant;

use hostler_proto::agent::v1::Phase;
use rustix::process::Signal;

use crate::harness::{Answer, CHAT, Scene, Seen, chat, chat_stream, is_alive, kill_group, signal};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_survives_a_killed_agent_with_open_streams() {
    let scene = Scene::new().await;
    let agent = scene.agent("agent", "2", &["--if-agent-dies", "kill"]);
    let engines: Vec<u32> = scene.ready(2).await.iter().map(|replica| replica.pid).collect();
    assert_eq!(scene.keepers().len(), 2);
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut stream = scene.router.edge().open(CHAT, &chat_stream(5_000)).await;
        stream.events(2).await;
        streams.push(stream);
    }
    agent.signal(Signal::KILL);
    scene.until_no_process_is_left().await;
    assert!(!engines.iter().any(|pid| is_alive(*pid)));
    for stream in streams {
        stream.finish().await.assert_broken_stream();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_kept_engine_go_on_under_the_next_agent() {
    let scene = Scene::new().await;
    let keep = ["--if-agent-dies", "keep"];
    let mut agent = scene.agent("agent", "1", &keep);
    let before = scene.ready(1).await;
    let edge = scene.router.edge();
    let open = async || {
        let mut streams = Vec::new();
        for number in 0..20 {
            let mut body = chat_stream(200);
            body["messages"][0]["content"] = format!("{number} is a question").into();
            let mut stream = edge.open(CHAT, &body).await;
            stream.events(2).await;
            streams.push(stream);
        }
        streams
    };
    let streams = open().await;
    agent.signal(Signal::KILL);
    agent.ended().await;
    let _next = scene.agent("next", "1", &keep);
    let mut answers = Vec::new();
    for stream in streams {
        answers.push(stream.finish().await);
    }
    for (answer, undisturbed) in answers.iter().zip(open().await) {
        answer.assert_whole_stream();
        assert_eq!(answer.text().matches(": resumed\n\n").count(), 1, "{}", answer.text());
        assert_eq!(text_of(answer), text_of(&undisturbed.finish().await));
    }
    let after = scene.ready(1).await;
    kill_group(before[0].pid);
    assert_eq!((after[0].pid, after[0].epoch), (before[0].pid, before[0].epoch), "it is the same life");
}

fn text_of(answer: &Answer) -> String {
    let events = answer.events().into_iter().filter_map(|event| serde_json::from_str::<serde_json::Value>(&event).ok());
    events.filter_map(|event| Some(event.pointer("/choices/0/delta/content")?.as_str()?.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_agent_adopts_kept_engines_within_three_seconds() {
    let scene = Scene::new().await;
    let keep = ["--if-agent-dies", "keep"];
    let mut agent = scene.agent("agent", "2", &keep);
    let before = scene.ready(2).await;
    for _ in 0..4 {
        assert_eq!(scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
    }
    let known = scene.until_replicas("the caches known", |replicas| replicas.iter().any(|replica| replica.cache.blocks > 0)).await;
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut stream = scene.router.edge().open(CHAT, &chat_stream(5_000)).await;
        stream.events(2).await;
        streams.push(stream);
    }
    agent.signal(Signal::KILL);
    agent.ended().await;
    for stream in streams {
        stream.finish().await.assert_broken_stream();
    }
    scene.until_replicas("the agent's end noticed", |replicas| !replicas.iter().any(Seen::is_ready)).await;
    assert!(before.iter().all(|replica| is_alive(replica.pid)), "kept engines live on");

    let mut next = scene.agent("next", "2", &keep);
    let after = scene.ready(2).await;
    assert_eq!(scene.router.edge().post(CHAT, &chat(3)).await.status, 200);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((before.pid, before.epoch, before.restarts, &before.socket), (after.pid, after.epoch, after.restarts, &after.socket));
    }
    // Blocks cached before are known again from the engines' replay.
    scene
        .until_replicas("the caches known again", |replicas| {
            replicas.iter().zip(&known).all(|(now, known)| now.cache.exact && now.cache.blocks >= known.cache.blocks)
        })
        .await;

    // The engines also end with their new agent as if it had started them.
    scene.ends(&mut next, Signal::TERM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_engine_stays_asleep_and_keeps_its_adapters() {
    let scene = Scene::new().await;
    let keep = ["--if-agent-dies", "keep"];
    let mut agent = scene.agent("agent", "1", &keep);
    let before = scene.ready(1).await.remove(0);
    scene.admin().lora("n0/0", "poet", "/tmp").await.unwrap();
    scene.admin().sleep("n0/0", 1).await.unwrap();
    agent.signal(Signal::KILL);
    agent.ended().await;
    scene.until_replicas("the agent's end noticed", |replicas| replicas.iter().all(|replica| replica.suspect)).await;

    let _next = scene.agent("next", "1", &keep);
    let asleep =
        scene.until_replicas("heard of again", |replicas| replicas[0].phase == Phase::Sleeping && !replicas[0].suspect).await.remove(0);
    assert_eq!((asleep.pid, asleep.epoch), (before.pid, before.epoch));
    assert!(asleep.reason.contains("since before this agent began"), "{}", asleep.reason);
    assert_eq!(scene.admin().wake("n0/0").await.unwrap(), ["n0/0"]);
    let awake = scene.ready(1).await.remove(0);
    assert_eq!((awake.epoch, &awake.models[..]), (before.epoch, &["simulated".to_owned(), "poet".to_owned()][..]));
    signal(awake.pid, Signal::KILL);
    let again = scene.until_replicas("another life", |replicas| replicas[0].is_ready() && replicas[0].epoch > awake.epoch).await.remove(0);
    assert_eq!(again.models, ["simulated", "poet"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_hung_up_finishes_answers_and_leaves_its_engines() {
    let scene = Scene::new().await;
    let keep = ["--if-agent-dies", "keep"];
    let mut agent = scene.agent("agent", "2", &keep);
    let before = scene.ready(2).await;
    let mut stream = scene.router.edge().open(CHAT, &chat_stream(100)).await;
    stream.events(2).await;
    agent.signal(Signal::HUP);
    stream.finish().await.assert_whole_stream();
    assert!(agent.ended().await.success(), "{}", agent.stderr());
    assert!(before.iter().all(|replica| is_alive(replica.pid)), "they live on");

    let mut next = scene.agent("next", "2", &keep);
    let same = |replicas: &[Seen]| {
        replicas.iter().zip(&before).all(|(now, before)| now.is_ready() && (now.pid, now.epoch) == (before.pid, before.epoch))
    };
    scene.until_replicas("the same engines", |replicas| replicas.len() == 2 && same(replicas)).await;
    next.signal(Signal::TERM);
    assert!(next.ended().await.success(), "{}", next.stderr());
    scene.until_no_process_is_left().await;

    // If engines end with their agent, a closed terminal is a reason to stop.
    let mut agent = scene.agent("third", "1", &["--if-agent-dies", "kill"]);
    scene.until_replicas("it serves", |replicas| replicas.iter().any(Seen::is_ready)).await;
    scene.ends(&mut agent, Signal::HUP).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_of_unproven_origin_is_killed_and_replaced() {
    for (flags, forge) in [(&[][..], true), (&["--model", "another"][..], false)] {
        let scene = Scene::new().await;
        let keep = ["--if-agent-dies", "keep"];
        let mut agent = scene.agent("agent", "1", &keep);
        let before = scene.ready(1).await.remove(0);
        agent.signal(Signal::KILL);
        agent.ended().await;
        if forge {
            let record = scene.engine().join("engine.pid");
            let text = fs::read_to_string(&record).unwrap();
            let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            words[1] = (words[1].parse::<u64>().unwrap() - 1).to_string();
            fs::write(&record, words.join(" ")).unwrap();
        }
        let _next = scene.agent("next", "1", &[&keep[..], flags].concat());
        let after =
            scene.until_replicas("another life", |replicas| replicas.iter().any(|now| now.is_ready() && now.epoch > before.epoch)).await;
        assert!(!is_alive(before.pid), "the old engine lives beside the new one");
        assert_ne!(after[0].pid, before.pid);
        assert_eq!(scene.place.processes().len(), 3, "an agent, a keeper and an engine");
        assert_eq!(
            scene
                .router
                .edge()
                .post(CHAT, &{
                    let mut body = chat(2);
                    body["model"] = after[0].models[0].clone().into();
                    body
                })
                .await
                .status,
            200
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_engines_end_by_themselves_without_a_next_agent() {
    let scene = Scene::new().await;
    let agent = scene.agent("agent", "1", &["--if-agent-dies", "keep", "--takeover-timeout", "1s"]);
    let engine = scene.ready(1).await.remove(0).pid;
    agent.signal(Signal::KILL);
    let killed = Instant::now();
    scene.until_no_process_is_left().await;
    assert!(!is_alive(engine) && killed.elapsed() > Duration::from_millis(900), "{:?}", killed.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_keeper_takes_its_engine_along_and_both_restart() {
    for fate in ["kill", "keep"] {
        let scene = Scene::new().await;
        let _agent = scene.agent("agent", "1", &["--if-agent-dies", fate]);
        let before = scene.ready(1).await.remove(0);
        let keepers = scene.keepers();
        assert_eq!(keepers.len(), 1);
        signal(keepers[0], Signal::KILL);
        scene.until_replicas("the next life", |replicas| replicas[0].is_ready() && replicas[0].epoch > before.epoch).await;
        assert!(!is_alive(before.pid) && !is_alive(keepers[0]));
        assert_eq!(scene.admin().replica("n0/0").await.restarts, 1);
        assert_eq!(scene.place.processes().len(), 3, "an agent, a keeper and an engine");
    }
}
