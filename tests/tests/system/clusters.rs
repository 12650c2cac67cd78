//! Features for users of a cluster beside `up`: their fleet's files, its address for programs here
//! and elsewhere, and the diagnosis of what keeps it from working.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hostler_tls::connect_to_host;
use http::Request;
use http_body_util::Full;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{Endpoint, PROGRAM, Program, Workplace, exchange, is_alive, soon, until};

/// All files below a folder, with their modes.
fn files(folder: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            found.insert(entry.path(), (mode, fs::read(entry.path()).unwrap()));
        }
    }
    found
}

/// Puts a program in front of all others.
fn add_program(place: &mut Workplace, name: &str, script: &str) {
    let folder = place.path().join("bin");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join(name), script).unwrap();
    fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    let path: &'static str = format!("{}:/usr/bin:/bin", folder.display()).leak();
    place.environment.retain(|(name, _)| *name != "PATH");
    place.environment.push(("PATH", path));
}

/// A host with cron and without a systemd of the user's.
fn add_cron(place: &mut Workplace) {
    add_program(place, "systemctl", "#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n");
    let crontab = "#!/bin/sh\nif [ \"$1\" = - ]; then cat >$HOME/crontab; elif [ -e $HOME/crontab ]; then cat $HOME/crontab; \
                   else echo 'no crontab for me' >&2; exit 1; fi\n";
    add_program(place, "crontab", crontab);
}

/// Folder with the state of the user's fleet.
fn fleet_folder(place: &Workplace) -> PathBuf {
    let folder = place.path().join(".local/state/hostler/fleet");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).unwrap();
    folder
}

/// Writes the state of a fleet whose controller is this test.
fn write_endpoint(place: &Workplace, edge: &str) {
    write_endpoint_of(place, edge, &Value::Null);
}

/// Writes the state of a fleet whose controller is in this batch job, unless that is null.
fn write_endpoint_of(place: &Workplace, edge: &str, job: &Value) {
    let folder = fleet_folder(place);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned();
    let endpoint = json!({
        "host": host, "pid": std::process::id(), "instance": "test", "edge": edge, "operators_socket": "/nowhere", "agents": "here:1",
        "admin": "127.0.0.1:1", "edge_socket": place.path().join("e.sock"),
        "key_file": place.path().join(".config/hostler/user.key"),
        "job": job, "authority": place.path().join(".config/hostler/fleet/ca.crt"),
    });
    // Write the file whole or not at all, because somebody may be reading it.
    fs::write(folder.join("endpoint.new"), endpoint.to_string()).unwrap();
    fs::rename(folder.join("endpoint.new"), folder.join("endpoint.json")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_creates_a_fleet_and_a_second_run_changes_nothing() {
    let place = Workplace::new();
    let folder = place.path().join(".config/hostler");
    let made = place.run(&["init", "--site", "polaris"]).await;
    assert!(made.success, "{}", made.stderr);
    assert_eq!(made.stdout.matches(" made ").count(), 5, "{}", made.stdout);
    let before = files(&folder);
    let open: Vec<_> = before.iter().filter(|(_, (mode, _))| mode & 0o077 != 0).map(|(path, _)| path.file_name().unwrap()).collect();
    assert_eq!(open, ["ca.crt"], "what others can read");
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    let again = place.run(&["init", "--site", "polaris"]).await;
    assert!(again.success && !again.stdout.contains(" made ") && again.stdout.matches(" there ").count() == 5, "{}", again.stdout);
    assert!(files(&folder) == before);
    assert!(place.run(&["check"]).await.success);

    // A missing key is made again, and the fleet that it belongs to stays.
    fs::remove_file(folder.join("user.key")).unwrap();
    let token = place.path().join("join-token").to_str().unwrap().to_owned();
    let mended = place.run(&["init", "--out", &token]).await;
    assert!(mended.success && mended.stdout.contains("your key    made"), "{}", mended.stdout);
    assert!(fs::metadata(&token).unwrap().permissions().mode() & 0o777 == 0o600);
    let listed = place.run(&["token", "list"]).await.stdout;
    assert_eq!(listed.lines().count(), 2, "{listed}");

    // A router with these settings serves that key, and nobody else.
    let router =
        place.start("router", &["router", "--listen", "127.0.0.1:0", "--agents-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    let edge = Endpoint::Tcp(router.address("edge").await);
    let key = fs::read_to_string(folder.join("user.key")).unwrap();
    let request = Request::get("/v1/models").header("authorization", format!("Bearer {}", key.trim()));
    assert_eq!(edge.request(request.body(Full::<Bytes>::default()).unwrap()).await.status, 200);
    assert_eq!(edge.get("/v1/models").await.status, 401);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_keeps_existing_settings_and_says_what_they_lack() {
    let place = Workplace::new();
    let own = place.file("own.toml", "[router]\nmax_queued = 7\n");
    let made = place.run(&["init", "--config", &own, "--site", "generic-slurm"]).await;
    assert!(made.success, "{}", made.stderr);
    assert_eq!(fs::read_to_string(&own).unwrap(), "[router]\nmax_queued = 7\n");
    let fleet = place.path().join("fleet");
    assert!(made.stdout.contains(&format!("[router]\ntls_dir = \"{}\"\n", fleet.display())), "{}", made.stdout);
    assert!(made.stdout.contains("scheduler = \"slurm\"") && fleet.join("ca.key").exists(), "{}", made.stdout);
    let listed = place.run(&["init", "--site", "list"]).await.stdout;
    assert!(listed.contains("polaris") && listed.contains("gadi"), "{listed}");
    let unknown = place.run(&["init", "--site", "nowhere"]).await;
    assert!(!unknown.success && unknown.stderr.contains("the sites are generic-pbs, "), "{}", unknown.stderr);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cron_starts_a_wanted_controller_again() {
    let mut place = Workplace::new();
    add_cron(&mut place);
    fs::write(place.path().join("crontab"), "MAILTO=me\n").unwrap();
    for _ in 0..2 {
        let made = place.run(&["init", "--site", "generic-pbs", "--service"]).await;
        assert!(made.success && made.stdout.contains("a line of your crontab"), "{}{}", made.stdout, made.stderr);
    }
    let table = fs::read_to_string(place.path().join("crontab")).unwrap();
    let (first, line) = table.trim_end().split_once('\n').unwrap();
    assert!(first == "MAILTO=me" && line.starts_with("*/5 * * * * env 'PATH=") && !line.contains('\n'), "{table}");
    let settings = place.path().join(".config/hostler/hostler.toml");
    assert!(line.contains(&format!(" controller --ensure --config {} ", settings.display())), "{line}");

    // As cron does it: nothing is wanted, so nothing is started.
    let ensured = place.run(&["controller", "--ensure"]).await;
    assert!(ensured.success && ensured.stderr.is_empty(), "{}", ensured.stderr);
    assert!(!fleet_folder(&place).join("controller.log").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timer_of_systemd_is_preferred_to_cron() {
    let mut place = Workplace::new();
    add_cron(&mut place);
    add_program(&mut place, "systemctl", "#!/bin/sh\necho \"$@\" >>$HOME/systemctl.log\n");
    add_program(&mut place, "loginctl", "#!/bin/sh\n[ $1 = show-user ] && echo no\nexit 0\n");
    let made = place.run(&["init", "--site", "generic-pbs", "--service"]).await;
    assert!(made.success && made.stdout.contains("`loginctl enable-linger`"), "{}{}", made.stdout, made.stderr);
    let log = fs::read_to_string(place.path().join("systemctl.log")).unwrap();
    let timer = log.lines().find_map(|line| line.strip_prefix("--user enable --now ")).unwrap_or_else(|| panic!("{log}"));
    let units = place.path().join(".config/systemd/user");
    let unit = fs::read_to_string(units.join(timer.replace(".timer", ".service"))).unwrap();
    assert!(unit.contains("\"controller\" \"--ensure\"") && units.join(timer).exists(), "{unit}");
    assert!(!place.path().join("crontab").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_help_of_a_fleet_of_jobs_shows_what_it_takes() {
    let place = Workplace::new();
    let [all, jobs] = [place.run(&["up", "--help"]).await.stdout, place.run(&["up", "--nodes", "2", "--help"]).await.stdout];
    assert!(all.contains("--admin-listen") && all.contains("--walltime"), "{all}");
    assert!(!jobs.contains("--admin-listen") && jobs.contains("--walltime") && jobs.contains("--detach"), "{jobs}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn env_gives_a_shell_the_fleets_address_and_key() {
    let mut place = Workplace::new();
    place.environment.push(("NO_PROXY", "internal"));
    let none = place.run(&["env"]).await;
    assert!(!none.success && none.stdout.is_empty() && none.stderr.contains("no fleet of yours runs"), "{}", none.stderr);
    assert!(place.run(&["init", "--site", "generic-pbs"]).await.success);
    write_endpoint(&place, "https://127.0.0.1:41237");
    let key = fs::read_to_string(place.path().join(".config/hostler/user.key")).unwrap().trim().to_owned();
    let printed = place.run(&["env"]).await;
    let lines: Vec<&str> = printed.stdout.lines().take(3).collect();
    let (address, key_line) = ("export OPENAI_BASE_URL=https://127.0.0.1:41237/v1", format!("export OPENAI_API_KEY={key}"));
    assert_eq!(lines, [address, &key_line, "export NO_PROXY='internal,localhost,127.0.0.1'"], "{}", printed.stderr);
    let access: Value = serde_json::from_str(&place.run(&["env", "--json"]).await.stdout).unwrap();
    let bundle = format!("export NODE_EXTRA_CA_CERTS={}", place.path().join(".local/state/hostler/fleet/ca-bundle.pem").display());
    assert!(printed.stdout.lines().any(|line| line == bundle), "{}", printed.stdout);
    assert_eq!((access["base_url"].as_str(), access["api_key"].as_str()), (Some("https://127.0.0.1:41237/v1"), Some(key.as_str())));
    let key_file = place.path().join(".config/hostler/user.key");
    fs::set_permissions(&key_file, fs::Permissions::from_mode(0o644)).unwrap();
    let open = place.run(&["env"]).await;
    assert!(!open.success && open.stderr.contains("chmod 600") && !open.stdout.contains(&key), "{}", open.stderr);
}

/// A place with a controller that runs on this host. Its scheduler has no jobs and takes none.
async fn place_with_controller() -> (Workplace, Program) {
    let mut place = Workplace::new();
    place.environment.push(("HOSTLER_CLUSTER_SCHEDULER", "pbs"));
    add_program(&mut place, "qselect", "#!/bin/sh\nexit 0\n");
    add_program(&mut place, "qsub", "#!/bin/sh\nexit 1\n");
    assert!(place.run(&["init", "--site", "generic-pbs"]).await.success);
    let folder = fleet_folder(&place);
    fs::write(folder.join("fleet.toml"), "[[model]]\nname = \"chat\"\nmodel = \"chat\"\nnodes = 1\nwalltime = \"1h\"\n").unwrap();
    let controller = place.start("controller", &["controller"]);
    until("where the fleet is reached", async || if folder.join("endpoint.json").exists() { Ok(()) } else { Err(controller.stderr()) })
        .await;
    (place, controller)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_takes_a_controllers_port_gets_no_key() {
    let (mut place, mut controller) = place_with_controller().await;
    let edge = controller.address("edge").await;
    let printed = place.run(&["env"]).await;
    assert!(printed.stdout.contains(&format!("export OPENAI_BASE_URL=https://{edge}/v1\n")), "{}{}", printed.stdout, printed.stderr);
    let bundle = printed.stdout.lines().find_map(|line| line.strip_prefix("export NODE_EXTRA_CA_CERTS=")).unwrap();
    let key = fs::read_to_string(place.path().join(".config/hostler/user.key")).unwrap().trim().to_owned();
    // Clients recognise the edge by the files that they are told of.
    for host in ["127.0.0.1", "localhost"] {
        let stream = TcpStream::connect(edge).await.unwrap();
        let stream = connect_to_host(stream, Path::new(bundle), host, b"http/1.1").await.unwrap();
        let request = Request::get("/v1/models").header("authorization", format!("Bearer {key}"));
        let answer = exchange(stream, request.body(Full::<Bytes>::default()).unwrap()).await.unwrap();
        assert_eq!(answer.status, 200);
    }

    controller.signal(Signal::KILL);
    controller.ended().await;
    let other = TcpListener::bind(edge).await.unwrap();
    let line = json!({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "chat", "messages": []}});
    let files = [place.file("in.jsonl", &format!("{line}\n")), place.path().join("out.jsonl").display().to_string()];
    place.environment.push(("OPENAI_API_KEY", key.clone().leak()));
    let target = format!("https://{edge}/v1");
    let _batch = place.start("batch", &["batch", &files[0], &files[1], "--target", &target]);
    let (mut connection, _) = soon("a connection of the batch", other.accept()).await.unwrap();
    connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    let mut heard = Vec::new();
    // The client hangs up, or waits for the rest of a handshake.
    connection.shutdown().await.unwrap();
    soon("all that it says", connection.read_to_end(&mut heard)).await.ok();
    let has = |word: &str| heard.windows(word.len()).any(|part| part == word.as_bytes());
    assert!(!heard.is_empty() && !has(&key) && !has("Bearer") && !has("chat"), "{}", String::from_utf8_lossy(&heard));
}

/// A fake ssh, sufficient for `hostler connect`: a command on the other side, and orders to the
/// connection.
///
/// The other side's login shell is chatty.
const SSH: &str = r#"#!/bin/bash
echo "$@" >> "$HOME/ssh.log"
case " $* " in
*" -O cancel "*) exit 0 ;;
*" -O forward "*) while [ -e "$HOME/hold" ]; do sleep 0.02; done; exit "$(cat "$HOME/forward.code" 2>/dev/null || echo 0)" ;;
*" away "*) echo "ssh: connect to host away: no route" >&2; exit 255 ;;
esac
echo $$ > "$HOME/ssh.pid"
echo 'Welcome to login1 {"host": 1}'
exec sh -c "${*: -1}"
"#;

fn place_with_ssh() -> Workplace {
    let mut place = Workplace::new();
    add_program(&mut place, "ssh", SSH);
    symlink(PROGRAM, place.path().join("bin/hostler")).unwrap();
    // A login shell has its own PATH.
    fs::write(place.path().join(".bash_profile"), "PATH=$HOME/bin:$PATH\n").unwrap();
    place
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_reaches_the_fleet_until_it_ends() {
    let place = place_with_ssh();
    assert!(place.run(&["init", "--site", "generic-pbs"]).await.success);
    write_endpoint(&place, "https://127.0.0.1:41237");
    let mut connected = place.start("connect", &["connect", "me@login1"]);
    let address = connected.line("export OPENAI_BASE_URL").await;
    let port = address.strip_prefix("export OPENAI_BASE_URL=https://localhost:").unwrap().strip_suffix("/v1").unwrap();
    assert!(connected.line("export OPENAI_API_KEY").await.contains("=hk_"));
    let operators = connected.line("export HOSTLER_ADMIN=").await;
    let log = fs::read_to_string(place.path().join("ssh.log")).unwrap();
    assert!(log.contains(&format!("-L localhost:{port}:127.0.0.1:41237 -- me@login1")), "{log}");
    let socket = operators.split_once('=').unwrap().1;
    assert!(log.contains(&format!("-L {socket}:/nowhere -- me@login1")), "ps and top reach the router: {log}");
    let ssh: u32 = fs::read_to_string(place.path().join("ssh.pid")).unwrap().trim().parse().unwrap();
    assert!(is_alive(ssh));
    connected.signal(Signal::TERM);
    assert!(connected.ended().await.success(), "{}", connected.stderr());
    assert!(!is_alive(ssh), "ssh ends with it");
    let socket = log.split("ControlPath=").nth(1).unwrap().split_whitespace().next().unwrap();
    assert!(socket.starts_with("/tmp/hostler-") && !Path::new(socket).parent().unwrap().exists(), "{socket}");

    // `hostler connect` also ends with ssh.
    fs::remove_file(place.path().join("ssh.pid")).unwrap();
    let mut connected = place.start("again", &["connect", "me@login1"]);
    connected.line("export OPENAI_BASE_URL").await;
    let ssh: u32 = fs::read_to_string(place.path().join("ssh.pid")).unwrap().trim().parse().unwrap();
    crate::harness::signal(ssh, Signal::TERM);
    assert!(!connected.ended().await.success());
    until("the reason", async || {
        let message = connected.stderr();
        if message.contains("error: the connection to me@login1 has ended") { Ok(()) } else { Err(message) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_keeps_its_address_when_the_fleet_moves() {
    let place = place_with_ssh();
    assert!(place.run(&["init", "--site", "generic-pbs"]).await.success);
    write_endpoint_of(&place, "https://x1:41237", &json!("11.head"));
    let mut connected = place.start("connect", &["connect", "me@login1"]);
    connected.line("export OPENAI_BASE_URL=https://localhost:").await;
    let bundle = connected.line("export SSL_CERT_FILE=").await.split_once('=').unwrap().1.to_owned();
    let authority = fs::read_to_string(place.path().join(".config/hostler/fleet/ca.crt")).unwrap();
    assert!(fs::read_to_string(&bundle).unwrap().contains(authority.trim()), "{bundle}");
    let port = forwarded_port(&place, "x1:41237").unwrap();
    write_endpoint_of(&place, "https://x2:41238", &json!("12.head"));
    let moved = until("the same port forwarded elsewhere", async || forwarded_port(&place, "x2:41238")).await;
    assert_eq!(moved, port);
    let log = fs::read_to_string(place.path().join("ssh.log")).unwrap();
    assert!(log.contains(&format!("-O cancel -L localhost:{port}:x1:41237")), "{log}");
    connected.signal(Signal::TERM);
    assert!(connected.ended().await.success(), "{}", connected.stderr());
    assert!(Path::new(&bundle).exists(), "a shell that still names it would trust nobody");
}

/// Port of this machine that ssh was told to forward there.
fn forwarded_port(place: &Workplace, there: &str) -> Result<u16, String> {
    let log = fs::read_to_string(place.path().join("ssh.log")).unwrap_or_default();
    let order =
        log.lines().find_map(|line| line.split(" -O forward -L localhost:").nth(1)?.strip_suffix(&format!(":{there} -- me@login1")));
    order.and_then(|port| port.parse().ok()).ok_or(log)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connect_says_why_it_cannot_connect() {
    let place = place_with_ssh();
    let away = place.run(&["connect", "away"]).await;
    assert!(!away.success && away.stderr.contains("no route") && away.stderr.contains("ssh cannot connect to away"), "{}", away.stderr);
    let nothing = place.run(&["connect", "login1"]).await;
    assert!(!nothing.success && nothing.stderr.contains("no fleet of yours runs"), "{}", nothing.stderr);
    assert!(nothing.stderr.contains("try `ssh login1 hostler env`"), "{}", nothing.stderr);
    assert!(place.run(&["init", "--site", "generic-pbs"]).await.success);
    write_endpoint(&place, "https://127.0.0.1:41237");
    fs::write(place.path().join("forward.code"), "255").unwrap();
    let refused = place.run(&["connect", "login1"]).await;
    assert!(!refused.success && refused.stderr.contains("ssh cannot forward port"), "{}", refused.stderr);
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let taken = place.run(&["connect", "login1", "--port", &port]).await;
    assert!(!taken.success && taken.stderr.contains("choose another one with --port"), "{}", taken.stderr);
    assert!(!place.run(&["connect", "-oProxyCommand=true"]).await.success);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_passes_a_sound_host_and_diagnoses_a_sick_one() {
    let mut place = Workplace::new();
    place.environment.extend([
        ("HOSTLER_CLUSTER_SCHEDULER", "pbs"),
        ("http_proxy", ""),
        ("HTTP_PROXY", ""),
        ("all_proxy", ""),
        ("ALL_PROXY", ""),
    ]);
    // Without any job in the list, nothing else is asked.
    add_program(&mut place, "qselect", "#!/bin/sh\nexit 0\n");
    add_program(&mut place, "vllm", "#!/bin/sh\nexit 0\n");
    add_cron(&mut place);
    fs::write(place.path().join(".bash_profile"), "echo busy host\nPATH=$HOME/bin:$PATH\n").unwrap();
    assert!(place.run(&["init", "--site", "generic-pbs", "--service"]).await.success);
    let sound = place.run(&["doctor"]).await;
    assert!(sound.success, "{}{}", sound.stdout, sound.stderr);
    assert!(sound.stdout.lines().all(|line| line.starts_with("ok ")), "{}", sound.stdout);
    let vllm = place.path().join("bin/vllm");
    assert!(sound.stdout.contains(&format!("jobs find {}", vllm.display())), "{}", sound.stdout);

    fs::remove_file(&vllm).unwrap();
    fs::remove_file(place.path().join(".config/hostler/user.key")).unwrap();
    add_program(&mut place, "qselect", "#!/bin/sh\necho 'cannot connect to server' >&2\nexit 1\n");
    fs::set_permissions(place.path().join(".local/state/hostler/fleet"), fs::Permissions::from_mode(0o755)).unwrap();
    let run_dir: &'static str = place.path().join("x".repeat(100)).to_str().unwrap().to_owned().leak();
    place.environment.extend([("http_proxy", "http://proxy:3128"), ("HOSTLER_AGENT_RUN_DIR", run_dir)]);
    let sick = place.run(&["doctor", "--model", "/no/such/model"]).await;
    assert!(!sick.success && sick.stderr.contains("problems were found"), "{}", sick.stderr);
    let problems: Vec<&str> = sick.stdout.lines().filter(|line| line.starts_with("problem")).collect();
    let subjects: Vec<&str> = problems.iter().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(subjects, ["scheduler", "fleet", "state", "proxy", "engine", "model", "sockets"], "{}", sick.stdout);
    assert!(sick.stdout.contains("cannot connect to server") && sick.stdout.contains("chmod 700"), "{}", sick.stdout);

    // Inside of a job an engine needs a GPU.
    place.environment.extend([("PBS_JOBID", "12.head"), ("CUDA_VISIBLE_DEVICES", "")]);
    let job = place.run(&["doctor"]).await.stdout;
    assert!(job.contains("problem  gpu ") && job.contains("ask for GPUs in cluster.resources"), "{job}");
    assert!(job.contains("inside of pbs job 12.head"), "{job}");
}
