//! GPUs that fail, are divided, taken or lost: the real agent over the fake driver of
//! `tests/fake-nvml`, with one simulated engine on each fake GPU. A fault affects only the engines
//! on its GPU.

use std::fs;
use std::time::Duration;

use tokio::time::Instant;

use hostler_fake_nvml::{Device, Fake, Process, Slice};
use hostler_proto::agent::v1::{GpuReading, Phase};
use tempfile::TempDir;

use crate::harness::{Answering, CHAT, Ended, Fleet, Setup, Workplace, chat, chat_stream, is_alive, until};

/// Time within which a failing GPU must be out of service.
const OUT_OF_SERVICE: Duration = Duration::from_secs(2);

/// A fleet of one agent on fake GPUs.
struct OnGpus {
    fleet: Fleet,
    driver: Fake,
    _directory: TempDir,
}

fn device(uuid: &str) -> Device {
    Device { uuid: uuid.to_owned(), ..Device::default() }
}

fn devices(count: usize) -> Vec<Device> {
    (0..count).map(|index| device(&format!("GPU-{index}0000000"))).collect()
}

impl OnGpus {
    /// Starts engines on all of them, and waits until they are ready.
    async fn start(devices: Vec<Device>, replicas: u32) -> Self {
        let on_gpus = Self::launch(devices, replicas).await;
        on_gpus.fleet.until_ready().await;
        on_gpus
    }

    async fn launch(devices: Vec<Device>, replicas: u32) -> Self {
        Self::launch_as(devices, replicas, |setup| setup).await
    }

    async fn launch_as(devices: Vec<Device>, replicas: u32, adapt: fn(Setup) -> Setup) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let driver = Fake::install(directory.path(), devices);
        let setup = Setup::agents(1).engine("--sim-step-ms 10").agent(|agent| {
            agent.replicas = replicas;
            agent.nvml_lib = driver.library().to_owned();
        });
        Self { fleet: Fleet::launch(adapt(setup)).await, driver, _directory: directory }
    }

    /// Output of an operator's command at this fleet's router.
    async fn hostler(&self, arguments: &[&str]) -> Ended {
        Workplace::new().run(&[arguments, &["--admin", self.fleet.admin().socket()]].concat()).await
    }

    /// Entry of `CUDA_VISIBLE_DEVICES` that a replica's engine was given.
    async fn visible(&self, id: &str) -> String {
        let pid = self.fleet.replica(id).await.pid;
        let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        let value = environment.split('\0').find_map(|variable| variable.strip_prefix("CUDA_VISIBLE_DEVICES="));
        value.unwrap_or_else(|| panic!("it has none: {environment}")).to_owned()
    }

    /// Readings that the router has for the GPUs of a replica.
    async fn readings(&self, id: &str) -> Vec<GpuReading> {
        let nodes = self.fleet.admin().nodes().await.unwrap();
        let replica = nodes.into_iter().flat_map(|node| node.replicas).find(|replica| replica.id == id);
        replica.unwrap().state().gpus.iter().filter_map(|gpu| gpu.reading.clone()).collect()
    }
}

/// Opens a stream at each replica, and waits until it has begun.
async fn a_stream_each(fleet: &Fleet, replicas: usize) -> Vec<Answering> {
    let mut opened = Vec::new();
    for number in 0..replicas {
        let mut body = chat_stream(200);
        body["messages"][0]["content"] = format!("{number} is a prompt of its own").into();
        let mut stream = fleet.edge().open(CHAT, &body).await;
        stream.events(2).await;
        opened.push(stream);
    }
    for index in 0..replicas {
        fleet.until_in_flight(&format!("n0/{index}"), 1).await;
    }
    opened
}

#[tokio::test(start_paused = true)]
async fn a_gpu_off_the_bus_is_quarantined_at_once() {
    let mut on_gpus = OnGpus::start(devices(3), 3).await;
    let fleet = &on_gpus.fleet;
    let before = fleet.admin().replicas().await.unwrap();
    let streams = a_stream_each(fleet, 3).await;
    let failed = Instant::now();
    on_gpus.driver.change(1, |device| device.xids.push(79));
    let quarantined = fleet.until_replica("n0/1", "quarantine", |replica| replica.phase == Phase::Quarantined).await;
    assert!(failed.elapsed() <= OUT_OF_SERVICE, "it took {:?}", failed.elapsed());
    assert!(quarantined.reason.contains("XID 79: GPU 1 has fallen off the bus"), "{}", quarantined.reason);
    // The router learns that the engine takes no more requests before it is gone.
    until("its engine's end", async || if is_alive(before[1].pid) { Err("it is alive".to_owned()) } else { Ok(()) }).await;
    assert!(failed.elapsed() <= OUT_OF_SERVICE, "it took {:?}", failed.elapsed());

    // The engine's stream continues from another engine.
    let mut resumed = 0;
    for stream in streams {
        let answer = stream.finish().await;
        answer.assert_whole_stream();
        resumed += usize::from(answer.text().contains(": resumed"));
    }
    assert_eq!(resumed, 1);
    for _ in 0..6 {
        assert_eq!(fleet.edge().post(CHAT, &chat(3)).await.status, 200);
    }
    for (index, before) in [0, 2].map(|index| (index, &before[index])) {
        let now = fleet.replica(&format!("n0/{index}")).await;
        assert!(now.is_ready() && (now.epoch, now.pid, now.restarts) == (before.epoch, before.pid, 0), "{now:#?}");
    }

    let table = on_gpus.hostler(&["ps"]).await.stdout;
    assert!(table.contains("quarantined") && table.contains("has fallen off the bus"), "{table}");
    let released = on_gpus.hostler(&["release", "n0/1"]).await;
    assert!(released.success, "{}", released.stderr);
    let back = fleet.until_replica("n0/1", "a new life", |replica| replica.is_ready()).await;
    assert!(back.epoch > before[1].epoch);
}

#[tokio::test(start_paused = true)]
async fn process_faults_are_only_logged_and_memory_errors_restart_engines() {
    let mut on_gpus = OnGpus::start(devices(2), 2).await;
    let fleet = &on_gpus.fleet;
    let before = fleet.admin().replicas().await.unwrap();
    for xid in [13, 31, 43, 45] {
        on_gpus.driver.change(0, |device| device.xids.push(xid));
        until("the XID is shown", async || {
            let readings = on_gpus.readings("n0/0").await;
            if readings.iter().any(|reading| u64::from(reading.last_xid) == xid) { Ok(()) } else { Err(format!("{readings:?}")) }
        })
        .await;
    }
    let same = fleet.replica("n0/0").await;
    assert!(same.is_ready() && same.epoch == before[0].epoch, "{same:#?}");

    on_gpus.driver.change(1, |device| device.xids.push(94));
    let failed = fleet.until_replica("n0/1", "a failure", |replica| replica.phase == Phase::Failed).await;
    assert!(failed.reason.contains("XID 94 on GPU 1: a contained memory error"), "{}", failed.reason);
    let back = fleet.until_replica("n0/1", "a new life", |replica| replica.is_ready() && replica.epoch > before[1].epoch).await;
    assert_eq!(back.restarts, 1);
    assert_eq!(fleet.replica("n0/0").await.epoch, before[0].epoch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silently_lost_gpu_is_found_by_its_readings() {
    let mut on_gpus = OnGpus::start(devices(2), 2).await;
    let fleet = &on_gpus.fleet;
    let lost = Instant::now();
    on_gpus.driver.change(0, |device| device.lost = true);
    let quarantined = async || fleet.until_replica("n0/0", "quarantine", |replica| replica.phase == Phase::Quarantined).await;
    assert!(quarantined().await.reason.contains("GPU 0 is lost"));
    assert!(lost.elapsed() <= OUT_OF_SERVICE, "it took {:?}", lost.elapsed());
    assert!(on_gpus.hostler(&["release", "n0/0"]).await.success);
    quarantined().await;
    assert!(fleet.replica("n0/1").await.is_ready());

    on_gpus.driver.change(0, |device| device.lost = false);
    assert!(on_gpus.hostler(&["release", "n0/0"]).await.success);
    fleet.until_replica("n0/0", "its return", |replica| replica.is_ready()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_slice_has_a_replica_and_shares_its_gpus_faults() {
    let slice = |uuid: &str| Slice { uuid: uuid.to_owned(), memory: 20 << 30, used: 50 << 20, ..Slice::default() };
    let divided = Device { slices: vec![slice("MIG-a"), slice("MIG-b")], ..device("GPU-10000000") };
    let mut on_gpus = OnGpus::launch_as(vec![device("GPU-00000000"), divided], 3, Setup::engines_as_processes).await;
    on_gpus.fleet.until_ready().await;
    let fleet = &on_gpus.fleet;
    let mut visible = Vec::new();
    for index in 0..3 {
        visible.push(on_gpus.visible(&format!("n0/{index}")).await);
    }
    visible.sort();
    // The layout decides which of them is the first.
    assert_eq!(visible, ["GPU-00000000", "MIG-a", "MIG-b"]);
    on_gpus.driver.change(1, |device| device.xids.push(95));
    until("both slices out of service", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        let quarantined = replicas.iter().filter(|replica| replica.phase == Phase::Quarantined).count();
        if quarantined == 2 { Ok(()) } else { Err(format!("{replicas:#?}")) }
    })
    .await;
    assert_eq!(fleet.admin().replicas().await.unwrap().iter().filter(|replica| replica.is_ready()).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_leftover_process_blocks_the_start_until_it_is_gone() {
    let tiny = Device { processes: vec![Process { pid: 1, used: 40 << 20 }], ..device("GPU-00000000") };
    let occupied = Device { processes: vec![Process { pid: std::process::id(), used: 61 << 30 }], ..device("GPU-10000000") };
    let mut on_gpus = OnGpus::launch(vec![tiny, occupied], 2).await;
    let fleet = &on_gpus.fleet;
    until("the agent", async || match fleet.admin().replicas().await.unwrap().len() {
        2 => Ok(()),
        count => Err(format!("{count} replicas")),
    })
    .await;
    fleet.until_replica("n0/0", "its readiness", |replica| replica.is_ready()).await;
    let blocked = fleet.until_replica("n0/1", "a failure", |replica| replica.phase == Phase::Failed).await;
    let message = format!("GPU 1 is in use by process {} (", std::process::id());
    assert!(blocked.reason.contains(&message) && blocked.reason.contains("61.0 GiB"), "{}", blocked.reason);
    assert_eq!((blocked.epoch, blocked.pid), (0, 0), "no engine was started there");
    on_gpus.driver.change(1, |device| device.processes.clear());
    fleet.until_replica("n0/1", "its readiness", |replica| replica.is_ready()).await;
}

#[tokio::test(start_paused = true)]
async fn gpu_figures_reach_operators() {
    let mut on_gpus = OnGpus::start(devices(1), 1).await;
    let warm = Device { celsius: 81, milliwatts: 650_500, used: 70 << 30, throttled: 0x40, uncorrected: 2, ..device("GPU-00000000") };
    on_gpus.driver.change(0, |device| *device = warm);
    let reading = until("figures", async || {
        let readings = on_gpus.readings("n0/0").await;
        readings.first().filter(|reading| reading.celsius == Some(81)).cloned().ok_or_else(|| format!("{readings:?}"))
    })
    .await;
    assert_eq!((reading.uuid.as_str(), reading.celsius, reading.watts), ("GPU-00000000", Some(81), Some(650.5)));
    assert_eq!((reading.memory_used_bytes, reading.ecc_uncorrected), (Some(70 << 30), Some(2)));
    assert_eq!(reading.throttled, ["temperature, by the hardware"]);
    on_gpus.driver.change(0, |device| device.celsius = 60);
    until("the next figures", async || {
        let readings = on_gpus.readings("n0/0").await;
        if readings[0].celsius == Some(60) { Ok(()) } else { Err(format!("{readings:?}")) }
    })
    .await;
}

const UP: [&str; 7] = ["up", "--engine", "simulated", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];

/// A place for programs that find fake GPUs and this value of `CUDA_VISIBLE_DEVICES`.
fn on_fake_gpus(driver: &Fake, visible: &'static str) -> Workplace {
    let mut workplace = Workplace::new();
    let library = driver.library().to_str().unwrap().to_owned();
    workplace.environment.extend([("CUDA_VISIBLE_DEVICES", visible), ("HOSTLER_NVML_LIB", library.leak())]);
    workplace
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_uses_the_gpus_it_names_or_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let driver = Fake::install(directory.path(), vec![device("GPU-aa11"), Device { lost: true, ..device("GPU-bb22") }, device("GPU-cc33")]);
    for (visible, message) in [
        ("", "CUDA_VISIBLE_DEVICES is set but names no GPU"),
        ("GPU-bb", "CUDA_VISIBLE_DEVICES names `GPU-bb`, but the GPUs of this host are 0 (GPU-aa11), 2 (GPU-cc33)"),
    ] {
        let refused = on_fake_gpus(&driver, visible).run(&UP).await;
        assert!(!refused.success && refused.stderr.contains(message), "{visible:?}: {}", refused.stderr);
    }
    let unknown = on_fake_gpus(&driver, "GPU-cc").run(&[&UP[..], &["--gpus", "7"]].concat()).await;
    assert!(!unknown.success && unknown.stderr.contains("agent.gpus names `7`, but the GPUs of this host are 0"), "{}", unknown.stderr);
    // The setting is somebody's word about this very command.
    for (visible, more) in [("GPU-cc", &[][..]), ("GPU-aa", &["--gpus", "2"][..])] {
        let workplace = on_fake_gpus(&driver, visible);
        let program = workplace.start("up", &[&UP[..], more, &["--", "--sim-start-ms", "50"]].concat());
        program.line("ready").await;
        check_only_the_last_gpu_is_used(&workplace);
    }
}

/// Checks the environments of engines.
fn check_only_the_last_gpu_is_used(workplace: &Workplace) {
    let engines: Vec<String> = workplace
        .processes()
        .into_iter()
        .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/environ")).ok())
        .filter(|environment| environment.contains("VLLM_RPC_BASE_PATH"))
        .collect();
    assert!(engines.iter().any(|environment| environment.contains("CUDA_VISIBLE_DEVICES=GPU-cc33\0")), "{engines:?}");
    assert!(engines.iter().all(|environment| !environment.contains("GPU-aa11")), "{engines:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_up_takes_the_gpus_that_the_first_has_left() {
    let directory = tempfile::tempdir().unwrap();
    let driver = Fake::install(directory.path(), vec![device("GPU-aa11"), device("GPU-bb22"), device("GPU-cc33")]);
    let workplace = on_fake_gpus(&driver, "0,1,2");
    let model = |name| ["--", "--sim-start-ms", "50", "--served-model-name", name];
    let first = workplace.start("first", &[&UP[..], &["--gpus", "0"], &model("a")].concat());
    first.line("ready").await;
    let edge = first.address("edge").await.to_string();
    let beside = ["up", "--engine", "simulated", "--listen", &edge];
    let taken = workplace.run(&[&beside[..], &["--gpus", "0,1"], &model("b")].concat()).await;
    let said = "agent.gpus names GPUs that are taken: GPU 0 by a (simulated, `hostler up`, process";
    assert!(!taken.success && taken.stderr.contains(said), "{}", taken.stderr);
    let second = workplace.start("second", &[&beside[..], &model("b")].concat());
    assert_eq!(second.line("ready").await, "ready   2 of 2 replicas");
    let none = workplace.run(&[&beside[..], &model("c")].concat()).await;
    assert!(!none.success && none.stderr.contains("all GPUs are taken: GPU 0 by a"), "{}", none.stderr);
}
