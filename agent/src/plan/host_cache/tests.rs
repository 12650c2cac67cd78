use super::*;
use crate::config::{AgentConfig, Profile};
use crate::plan::Plan;
use crate::plan::host_memory::MemoryLimit;
use crate::plan::tests::{Case, config, planned_in};

const MODEL: &str = "llama-3.1-8b";

fn host(memory_gib: u64, shared_gib: u64) -> HostResources {
    HostResources {
        shared_bytes: shared_gib * GIB,
        memory: HostMemory { bytes: memory_gib * GIB, limit: MemoryLimit::Host },
        ..HostResources::unlimited()
    }
}

fn planned(setting: &str, model: &str, (gpus, minor, given): (&str, u32, &str), host: HostResources) -> Plan {
    let host_cache = HostCacheSetting::try_from(setting.to_owned()).unwrap();
    let config = AgentConfig { host_cache, ..config(Profile::Throughput, given) };
    planned_in(&Case { model, gpus, nvlink: 0, minor, config }, host).unwrap()
}

/// Copies of each engine on two GPUs of 80 GiB, in GiB, or why there are none.
fn on_two(setting: &str, host: HostResources) -> Result<u64, NoHostCache> {
    match planned(setting, MODEL, ("2x80", 32, ""), host).host_cache {
        HostCache::On(share) => Ok(share.bytes / GIB),
        HostCache::Off(because) => Err(because),
    }
}

fn reason(setting: &str, model: &str, case: (&str, u32, &str)) -> NoHostCache {
    match planned(setting, model, case, host(2048, 1024)).host_cache {
        HostCache::Off(because) => because,
        HostCache::On(share) => panic!("{share:?}"),
    }
}

#[test]
fn a_size_is_shared_equally_and_auto_leaves_half_of_the_memory() {
    assert_eq!(on_two("256GiB", host(1024, 512)), Ok(128));
    assert_eq!(on_two("auto", host(1024, 1024)), Ok(256));
    assert_eq!(on_two("auto", host(1024, 402)), Ok(200), "vLLM keeps the copies in /dev/shm");
    assert_eq!(on_two("off", host(1024, 1024)), Err(NoHostCache::Unset));
    assert_eq!(on_two("auto", host(0, 1024)), Err(NoHostCache::NoMemory));
    assert_eq!(on_two("auto", host(16, 1024)), Err(NoHostCache::NoMemory));
}

#[test]
fn copies_no_larger_than_the_gpus_own_cache_are_left_off() {
    assert!(matches!(on_two("auto", host(128, 64)), Err(NoHostCache::Smaller { .. })));
    assert!(matches!(on_two("40GiB", host(1024, 512)), Err(NoHostCache::Smaller { .. })));
    assert!(matches!(on_two("600GiB", host(1024, 512)), Err(NoHostCache::NoSharedMemory { .. })));
}

#[test]
fn engines_that_cannot_keep_copies_say_why() {
    let gpu = "1x80";
    assert_eq!(reason("auto", MODEL, (gpu, 23, "")), NoHostCache::OldRelease);
    assert_eq!(reason("auto", MODEL, ("", 32, "")), NoHostCache::NoGpu);
    assert_eq!(reason("auto", "gpt-oss-20b", (gpu, 32, "")), NoHostCache::SeveralCaches);
    assert_eq!(reason("auto", MODEL, (gpu, 32, "--kv-offloading-size 8")), NoHostCache::UserDecides("--kv-offloading-size"));
    assert_eq!(reason("auto", MODEL, (gpu, 32, "--kv-transfer-config {}")), NoHostCache::UserDecides("--kv-transfer-config"));
}

#[test]
fn the_plan_has_the_flag_and_the_tokens_of_each_tier() {
    let plan = planned("400GiB", MODEL, ("2x80", 32, ""), host(1024, 512));
    let flags = plan.choices(&plan.replicas[0], plan.front_end.in_use);
    let flag = flags.iter().find(|choice| choice.flag == TRANSFER_FLAG).unwrap();
    let value: serde_json::Value = serde_json::from_str(&flag.value).unwrap();
    let extra = &value["kv_connector_extra_config"];
    assert_eq!((extra["cpu_bytes_to_use"].as_u64(), extra["self_describing_kv_events"].as_bool()), (Some(200 * GIB), Some(true)));
    // 128 KiB for each token of this model.
    let page = plan.page();
    assert!(page.contains("host cache about 1,638,400 tokens a replica, 200.0 GiB"), "{page}");
    let without = planned("off", MODEL, ("2x80", 32, ""), host(1024, 512)).page();
    assert!(!without.contains("host cache") && !without.contains(TRANSFER_FLAG), "{without}");
}

#[test]
fn a_host_a_control_group_and_a_job_get_different_answers_that_say_why() {
    // 36 GiB of KV cache on each GPU.
    let page = |gib, limit| {
        let memory = HostMemory { bytes: gib * GIB, limit };
        planned("auto", MODEL, ("1x60", 32, ""), HostResources { memory, ..host(0, 1024) }).page()
    };
    let said = |page: &str| page.lines().find_map(|line| line.strip_prefix("host cache ").map(str::to_owned)).unwrap();
    assert_eq!(
        said(&page(100, MemoryLimit::Host)),
        "about 409,600 tokens a replica, 50.0 GiB: an equal part of half of the 100.0 GiB that the host has; the other half, and 16 GiB at least, stay free"
    );
    assert!(said(&page(32, MemoryLimit::ControlGroup)).ends_with("that is a part of half of the 32.0 GiB that the control group allows"));
    assert!(said(&page(90, MemoryLimit::Job)).contains("45.0 GiB: an equal part of half of the 90.0 GiB that the job has on this node"));
}
