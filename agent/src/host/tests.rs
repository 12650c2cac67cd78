//! Tables for every decision about the host.

use super::*;

fn gpu(index: u32, uuid: &str) -> Gpu {
    Gpu { index, uuid: uuid.to_owned(), name: "test GPU".to_owned(), memory_bytes: 0 }
}

fn host(gpus: u32) -> Host {
    Host { name: "here".to_owned(), gpus: (0..gpus).map(|n| gpu(n, &format!("GPU-{n}"))).collect(), no_gpu_because: None }
}

fn vllm() -> Resolved {
    Resolved::Vllm { program: "/opt/vllm".into() }
}

fn simulated() -> Resolved {
    Resolved::Simulated { program: "/opt/hostler".into() }
}

fn lookup(found: bool) -> Lookup {
    Lookup { name: "vllm".into(), searched: "that name in PATH=/bin".to_owned(), found: found.then(|| "/opt/vllm".into()) }
}

#[test]
fn there_is_one_replica_per_gpu_unless_told_otherwise() {
    let table = [
        (4, vllm(), 0, Ok(4)),
        (4, vllm(), 2, Ok(2)),
        (0, vllm(), 0, Ok(1)),
        (0, vllm(), 3, Ok(3)),
        (0, simulated(), 0, Ok(2)),
        (8, simulated(), 0, Ok(2)),
        (1, simulated(), 5, Ok(5)),
        (2, vllm(), 3, Err(HostError::TooManyReplicas { replicas: 3, gpus: 2 })),
    ];
    for (gpus, engine, replicas, expected) in table {
        let config = AgentConfig { replicas, ..AgentConfig::default() };
        let planned = plan(&host(gpus), &engine, &config);
        let planned = match (planned, expected) {
            (Ok(planned), Ok(count)) => {
                assert_eq!(planned.len(), count);
                planned
            }
            (planned, expected) => {
                assert_eq!(planned.err(), expected.err());
                continue;
            }
        };
        for replica in planned {
            let on_gpu = gpus > 0 && engine == vllm();
            assert_eq!(replica.gpu.map(|gpu| gpu.index), on_gpu.then_some(replica.index));
        }
    }
}

#[test]
fn the_engine_kind_follows_from_what_is_given_and_found() {
    let no_vllm = || Err(HostError::NoVllm { name: "vllm".to_owned(), searched: "that name in PATH=/bin".to_owned() });
    let table = [
        (EngineKind::Auto, false, false, Ok(simulated())),
        (EngineKind::Auto, false, true, Err(HostError::NoModel)),
        (EngineKind::Auto, true, false, no_vllm()),
        (EngineKind::Auto, true, true, Ok(vllm())),
        (EngineKind::Vllm, false, false, Err(HostError::NoModel)),
        (EngineKind::Vllm, false, true, Err(HostError::NoModel)),
        (EngineKind::Vllm, true, false, no_vllm()),
        (EngineKind::Vllm, true, true, Ok(vllm())),
        (EngineKind::Simulated, true, true, Ok(simulated())),
        (EngineKind::Simulated, false, false, Ok(simulated())),
    ];
    for (kind, model_given, found, expected) in table {
        let resolved = resolve(kind, model_given, &lookup(found), Path::new("/opt/hostler"));
        assert_eq!(resolved, expected, "{kind:?} {model_given} {found}");
    }
}

#[test]
fn visible_devices_select_by_position_or_by_the_beginning_of_a_uuid() {
    let devices = [gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33")];
    type Expected = Result<&'static [u32], &'static str>;
    let table: [(Option<&str>, Expected); 12] = [
        (None, Ok(&[0, 1, 2])),
        (Some("2,0"), Ok(&[2, 0])),
        (Some(" 1 , 2 "), Ok(&[1, 2])),
        (Some("GPU-bb"), Ok(&[2])),
        (Some("GPU-aa22,0"), Ok(&[1, 0])),
        (Some("1,1"), Ok(&[1])),
        (Some("0,-1,2"), Ok(&[0])),
        (Some(""), Err("ask the scheduler for GPUs")),
        (Some("-1"), Err("--engine simulated")),
        (Some("GPU-aa"), Err("several")),
        (Some("3"), Err("0 (GPU-aa11), 1 (GPU-aa22), 2 (GPU-bb33)")),
        (Some("MIG-1234"), Err("MIG")),
    ];
    for (visible, expected) in table {
        match (select(&devices, visible), expected) {
            (Ok(gpus), Ok(expected)) => {
                let indices: Vec<u32> = gpus.iter().map(|gpu| gpu.index).collect();
                assert_eq!(indices, expected, "{visible:?}");
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, _) => panic!("{visible:?} gave {got:?}"),
        }
    }
}

#[test]
fn a_program_is_looked_up_by_path_or_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm");
    let search = directory.path().as_os_str();
    let name = Path::new("vllm");

    let missing = look_up(name, Some(search));
    assert_eq!(missing.found, None);
    assert!(missing.searched.contains(search.to_str().unwrap()));

    fs::write(&path, "").unwrap();
    assert_eq!(look_up(name, Some(search)).found, None, "not executable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(look_up(name, Some(search)).found, Some(path.clone()));
    assert_eq!(look_up(&path, None).found, Some(path));
    assert_eq!(look_up(name, None).found, None);
}

#[test]
fn the_token_budget_is_what_was_said_or_the_engines_default() {
    let gpu = |name: &str, gib: u64| Some(Gpu { name: name.to_owned(), memory_bytes: gib << 30, ..gpu(0, "GPU-0") });
    let table = [
        (vllm(), gpu("NVIDIA H100 80GB HBM3", 79), "", 8_192),
        (vllm(), gpu("NVIDIA A100-SXM4-80GB", 80), "", 2_048),
        (vllm(), gpu("NVIDIA L40S", 45), "", 2_048),
        (vllm(), gpu("NVIDIA B200", 178), "", 16_384),
        (vllm(), None, "", 2_048),
        (vllm(), gpu("NVIDIA H200", 140), "--performance-mode throughput", 16_384),
        (vllm(), gpu("NVIDIA H200", 140), "--max-num-batched-tokens 4096", 4_096),
        (vllm(), None, "--max_num_batched_tokens=8K", 8_192),
        (vllm(), None, "--max-num-batched-tokens 2.5k", 2_500),
        (vllm(), None, "--max-num-batched-tokens -1", 0),
        (vllm(), None, "--max-num-batched-tokens 9e99k", 0),
        (vllm(), None, "--max-num-batched-tokens many", 0),
        (vllm(), None, "--config engine.yaml", 0),
        (simulated(), None, "", 8_192),
        (simulated(), None, "--max-num-batched-tokens 512", 512),
    ];
    for (engine, gpu, line, expected) in table {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        assert_eq!(token_budget(&engine, Some(Version::new(0, 32)), gpu.as_ref(), &arguments), expected, "{gpu:?} {line}");
    }
    assert_eq!(token_budget(&vllm(), None, gpu("NVIDIA B200", 178).as_ref(), &[]), 8_192);
}
