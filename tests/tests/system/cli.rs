//! The program as a user starts it: its output, its leftovers, and its error messages.

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::CHAT;
use crate::harness::{Ended, Endpoint, PROGRAM, Program, Workplace, chat, chat_stream, hostler, is_alive, until};

/// URL and body of a printed `curl` line.
fn parsed(line: &str) -> (std::net::SocketAddr, String, Value) {
    let url = line.split_whitespace().find(|word| word.starts_with("http://")).unwrap().trim_start_matches("http://");
    let (address, path) = url.split_once('/').unwrap();
    let body = line.split_once("-d '").unwrap().1.strip_suffix('\'').unwrap();
    (address.parse().unwrap(), format!("/{path}"), serde_json::from_str(body).unwrap())
}

async fn engine_pids(up: &Program) -> Vec<u32> {
    let replicas = up.admin().await.replicas().await.unwrap();
    replicas.iter().map(|replica| replica.pid).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_prints_a_working_curl_line_and_leaves_nothing_behind() {
    let workplace = Workplace::new();
    let mut up = workplace.up(2, &["--sim-step-ms", "5"]);
    let (address, path, body) = parsed(&up.line("curl").await);
    assert_eq!(address, up.address("edge").await);
    assert_eq!(up.line("ready").await, "ready   2 of 2 replicas");
    let answer = Endpoint::Tcp(address).post(&path, &body).await;
    answer.assert_whole_stream();
    assert!(answer.events().len() > 10, "{}", answer.text());
    let engines = engine_pids(&up).await;
    assert!(engines.len() == 2 && engines.iter().all(|pid| is_alive(*pid)));

    // An interrupt lets running requests finish.
    let mut stream = Endpoint::Tcp(address).open(CHAT, &chat_stream(100)).await;
    stream.events(2).await;
    up.signal(Signal::INT);
    stream.finish().await.assert_whole_stream();
    assert!(up.ended().await.success(), "{}", up.stderr());
    assert!(!engines.iter().any(|pid| is_alive(*pid)), "an engine is left");
    assert_eq!(workplace.left(), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_interrupt_ends_up_at_once_with_nothing_left() {
    let workplace = Workplace::new();
    let mut up = workplace.up(1, &["--sim-step-ms", "5"]);
    up.line("curl").await;
    let engines = engine_pids(&up).await;
    let mut stream = Endpoint::Tcp(up.address("edge").await).open(CHAT, &chat_stream(10_000)).await;
    stream.events(2).await;
    up.signal(Signal::INT);
    until("the drain to begin", async || if up.stderr().contains("draining") { Ok(()) } else { Err(up.stderr()) }).await;
    up.signal(Signal::INT);
    up.ended().await;
    assert!(!engines.iter().any(|pid| is_alive(*pid)), "an engine is left");
    assert_eq!(workplace.left(), Vec::<std::path::PathBuf>::new());
    assert!(stream.finish().await.ended.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_list_drain_restart_and_read_logs() {
    let workplace = Workplace::new();
    let up = workplace.up(2, &[]);
    up.line("curl").await;
    let admin = up.admin().await.socket();
    let ask = async |arguments: &[&str]| {
        let ended = workplace.run(&[arguments, &["--admin", admin]].concat()).await;
        assert!(ended.success, "{arguments:?}: {}", ended.stderr);
        ended.stdout
    };
    let table = ask(&["ps"]).await;
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.starts_with("REPLICA") && table.matches(" ready ").count() == 2, "{table}");
    let list: Value = serde_json::from_str(&ask(&["ps", "--json"]).await).unwrap();
    let replica = &list["nodes"][0]["replicas"][1];
    let node = list["nodes"][0]["node"].as_str().unwrap();
    assert_eq!((replica["phase"].as_str(), replica["models"][0].as_str()), (Some("ready"), Some("simulated")), "{list}");

    let id = format!("{node}/1");
    assert!(ask(&["logs", &id, "-n", "5"]).await.contains("Application startup complete"));
    assert_eq!(ask(&["drain", &id]).await, format!("draining {id}\n"));
    let phase = async |desired: &str| {
        until(&format!("{id} {desired}"), async || {
            let list: Value = serde_json::from_str(&ask(&["ps", "--json"]).await).unwrap();
            if list["nodes"][0]["replicas"][1]["phase"] == desired { Ok(()) } else { Err(list.to_string()) }
        })
        .await;
    };
    phase("stopped").await;
    for order in ["drain", "restart"] {
        let refused = workplace.run(&[order, node, "--admin", admin]).await;
        let words = format!("error: nobody would serve simulated without {node}: start another replica first, or say --force\n");
        assert_eq!((refused.success, refused.stderr), (false, words), "{order}");
    }
    assert_eq!(ask(&["restart", &id]).await, format!("restarting {id}\n"));
    phase("ready").await;
    let edge = workplace.run(&["ps", "--admin", &up.address("edge").await.to_string()]).await;
    assert!(edge.stderr.contains("it may be a router's edge"), "{}", edge.stderr);
    let refused = workplace.run(&["drain", "nobody", "--admin", admin]).await;
    assert!(!refused.success);
    assert_eq!(refused.stderr, format!("error: no node or replica is called \"nobody\"; replicas: {node}/0, {id}\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_separate_router_and_agent_work_together() {
    let workplace = Workplace::new();
    let router = workplace
        .start("router", &["router", "--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    let agents = router.address("agents").await.to_string();
    let mut agent = workplace.start("agent", &["agent", "--router", &agents, "--engine", "simulated", "--replicas", "1", "--node", "far"]);
    let admin = router.admin().await;
    until("the node ready", async || {
        let replicas = admin.replicas().await.unwrap();
        if replicas.iter().any(|replica| replica.id == "far/0" && replica.is_ready()) { Ok(()) } else { Err(format!("{replicas:?}")) }
    })
    .await;
    let answer = Endpoint::Tcp(router.address("edge").await).post(CHAT, &chat(3)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    agent.signal(Signal::TERM);
    assert!(agent.ended().await.success(), "{}", agent.stderr());
    assert_eq!(workplace.left(), Vec::<std::path::PathBuf>::new());
}

fn assert_fails_with(ended: &Ended, parts: &[&str]) {
    assert!(!ended.success, "{}", ended.stdout);
    assert!(ended.stderr.lines().any(|line| line.starts_with("error: ")), "{}", ended.stderr);
    for part in parts {
        assert!(ended.stderr.contains(part), "{} should contain {part}", ended.stderr);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_settings_are_named_with_their_place() {
    let workplace = Workplace::new();
    let file = workplace.file("unknown.toml", "[router]\nlisten = \"127.0.0.1:0\"\nmax_bodybytes = 3\n");
    for command in ["check", "up", "router", "agent"] {
        let arguments = if command == "check" { vec!["check", &file] } else { vec![command, "--config", &file] };
        let expected = ["unknown.toml:3: unknown key `router.max_bodybytes`; did you mean `router.max_body_bytes`?"];
        assert_fails_with(&workplace.run(&arguments).await, &expected);
    }
    let file = workplace.file("bad.toml", "[agent]\ndrain_timeout = \"soon\"\n");
    assert_fails_with(&workplace.run(&["check", &file]).await, &["bad.toml:2: agent.drain_timeout: a duration such as"]);
    assert_fails_with(
        &workplace.run(&["router", "--max-in-flight", "many"]).await,
        &["--max-in-flight", "router.max_in_flight", "\"many\""],
    );
    let own = workplace.run(&["check", "--config", &workplace.file("good.toml", "[router]\n")]).await;
    assert!(own.success && own.stdout.ends_with("good.toml is sound\n"), "{}", own.stderr);
    assert_fails_with(&workplace.run(&["check", "/nowhere/hostler.toml"]).await, &["cannot read", "/nowhere/hostler.toml"]);
    assert_fails_with(&workplace.run(&["router", "--listen", "nonsense"]).await, &["nonsense", "router.listen"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_reported_at_once() {
    let workplace = Workplace::new();
    let up = workplace.up(1, &[]);
    let edge = up.address("edge").await.to_string();
    let second = Workplace::new().run(&["up", "--engine", "simulated", "--listen", &edge]).await;
    assert_fails_with(&second, &[&edge, "router.listen", "in use", "--listen"]);
    // A late failure must not leave an engine behind either: no engine outlives the agent.
    let workplace = Workplace::new();
    let arguments = ["agent", "--router", "127.0.0.1:1", "--engine", "simulated", "--replicas", "2", "--agent-admin", &edge];
    assert_fails_with(&workplace.run(&arguments).await, &[&edge, "agent.agent_admin", "in use", "--agent-admin"]);
    assert_eq!(workplace.left(), Vec::<std::path::PathBuf>::new());
    assert_eq!(workplace.processes(), Vec::<u32>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_vllm_is_refused_naming_the_searched_program() {
    let mut workplace = Workplace::new();
    workplace.environment.push(("PATH", "/nowhere"));
    let refused = workplace.run(&["up", "--model", "some/model", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]).await;
    assert_fails_with(&refused, &["vllm", "PATH", "--engine simulated"]);
    assert_eq!(refused.stdout, "", "no address of what does not run");
    let refused = workplace.run(&[
        "up",
        "--model",
        "some/model",
        "--vllm-bin",
        "/nowhere/vllm",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    assert_fails_with(&refused.await, &["/nowhere/vllm"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_model_is_refused_before_anything_starts() {
    let workplace = Workplace::new();
    for command in ["plan", "up"] {
        let refused = workplace.run(&[command, "--model", "/no/such/folder", "--vllm-bin", PROGRAM, "--engine", "vllm"]).await;
        assert_fails_with(&refused, &["--model /no/such/folder: there is no such file or folder"]);
        assert_eq!(refused.stdout, "", "{command}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shells_and_man_pages_cover_every_subcommand_and_setting() {
    let workplace = Workplace::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = workplace.run(&["completions", shell]).await;
        assert!(script.success && script.stdout.contains("max-body-bytes") && script.stdout.contains("explain"), "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    let written = workplace.run(&["docs", "man", folder.path().to_str().unwrap()]).await;
    assert!(written.success, "{}", written.stderr);
    let page = std::fs::read_to_string(folder.path().join("hostler-router.1")).unwrap();
    assert!(page.contains("max\\-body\\-bytes"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_router_is_reported_with_its_address() {
    let refused = hostler(&["ps", "--admin", "127.0.0.1:1"]).await;
    assert_fails_with(&refused, &["cannot reach a router's admin listener at 127.0.0.1:1", "--admin HOST:PORT"]);
}

/// An empty variable counts as unset, as in the XDG specification: otherwise the files of any
/// checkout would be read.
#[test]
fn an_empty_variable_does_not_select_the_working_directory() {
    let folder = tempfile::tempdir().unwrap();
    for place in ["hostler", ".config/hostler"].map(|place| folder.path().join(place)) {
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("hostler.toml"), "[someone_elses]\n").unwrap();
    }
    let reads_it = |home: &str, config: &str| {
        let mut command = std::process::Command::new(PROGRAM);
        command.args(["keys", "list"]).current_dir(&folder).env_clear().env("HOME", home).env("XDG_CONFIG_HOME", config);
        String::from_utf8(command.output().unwrap().stderr).unwrap().contains("someone_elses")
    };
    let here = folder.path().to_str().unwrap();
    assert!(reads_it("", here) && reads_it(here, ""), "what is named is read");
    assert!(!reads_it("", "") && !reads_it("/nowhere", ""), "an empty variable names nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_lines_for_operators_are_named_in_every_format() {
    let workplace = Workplace::new();
    let local = "127.0.0.1:0";
    let listens = ["router", "--listen", local, "--agents-listen", local, "--admin-listen", local, "--log-format"];
    for format in ["text", "json"] {
        let mut router = workplace.start(format, &[&listens[..], &[format]].concat());
        router.line("socket").await;
        router.signal(Signal::TERM);
        assert!(router.ended().await.success(), "{}", router.stderr());
        let log = router.stderr();
        let line = log.lines().find(|line| line.contains("drain_begun")).unwrap_or_else(|| panic!("{log}"));
        if format == "json" {
            let line: Value = serde_json::from_str(line).unwrap();
            assert_eq!((&line["fields"]["event"], &line["level"]), (&"drain_begun".into(), &"INFO".into()), "{line}");
        } else {
            assert!(line.contains(" INFO draining: ") && line.contains(" event=\"drain_begun\""), "{line}");
        }
    }
}
