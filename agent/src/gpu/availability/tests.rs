//! Descriptions of processes on a GPU, and the memory that matters.

use super::*;
use crate::gpu::MigSlice;

fn occupant(pid: u32, who: Option<(&str, &str)>, gib: Option<u64>) -> GpuOccupant {
    let who = who.map(|(name, owner)| (name.to_owned(), owner.to_owned()));
    GpuOccupant { pid, bytes: gib.map(|gib| gib << 30), who }
}

#[test]
fn a_process_occupying_a_gpu_is_named_with_its_owner() {
    let gpu = Gpu { index: 3, uuid: "GPU-aa".to_owned(), ..Gpu::default() };
    let obstacle = in_use_obstacle(&gpu, &[occupant(1234, Some(("python", "ada")), Some(61))], 19 << 30, 73 << 30);
    assert_eq!(
        obstacle.cause,
        "GPU 3 is in use by process 1234 (python, user ada, 61.0 GiB): 19.0 GiB are free and the engine takes 73.0 GiB"
    );
    assert!(obstacle.in_use && obstacle.remedy.starts_with("end it, give"), "{obstacle:?}");

    let hidden = in_use_obstacle(&gpu, &[occupant(7, None, None)], 1, 2);
    assert!(hidden.cause.contains("process 7 (not visible from here"), "{hidden:?}");

    // In a container the driver may name no other processes.
    let unnamed = in_use_obstacle(&gpu, &[], 1 << 30, 73 << 30);
    assert!(unnamed.cause.starts_with("GPU 3 is in use by processes that are not visible from here: 1.0 GiB are free"), "{unnamed:?}");

    let slice = Gpu { uuid: "MIG-11".to_owned(), slice: Some(MigSlice::default()), ..gpu };
    let many: Vec<GpuOccupant> = (0..6).map(|pid| occupant(pid, Some(("python", "ada")), None)).collect();
    let obstacle = in_use_obstacle(&slice, &many, 1, 2);
    assert!(obstacle.cause.starts_with("the slice MIG-11 of GPU 3 is in use by process 0 (python, user ada),"), "{obstacle:?}");
    assert!(obstacle.cause.contains("and 2 more: ") && obstacle.remedy.starts_with("end them,"), "{obstacle:?}");
}

#[test]
fn a_gpu_is_free_when_the_engines_memory_fits() {
    let of_80 = |used: u64| GpuUsage { processes: Vec::new(), memory: Some((80 << 30, used << 20)) };
    // Small users: a display with its few MiB, the MPS server, a monitor.
    assert_eq!(memory_shortfall(&of_80(300), 0.92), None);
    assert_eq!(memory_shortfall(&of_80(6_500), 0.92), None);
    assert!(memory_shortfall(&of_80(6_600), 0.92).is_some());
    assert_eq!(memory_shortfall(&of_80(40 << 10), 0.5), None, "two engines of one user's own arrangement");
    // A GPU that shares its host's memory has no figures of its own.
    assert_eq!(memory_shortfall(&GpuUsage::default(), 0.92), None);
}

#[test]
fn the_current_process_is_described() {
    let own = GpuOccupant::new(GpuProcess { pid: std::process::id(), bytes: None });
    let Some((name, owner)) = own.who else {
        assert!(!is_in_first_pid_namespace(), "only in a container a process is not seen");
        return;
    };
    assert!(!name.is_empty() && !owner.is_empty());
}
