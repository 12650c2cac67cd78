//! Division of cores.

use super::*;

fn near(list: &str) -> GpuLocality {
    GpuLocality { cpus: parse_cpu_list(list).into_iter().collect() }
}

/// Cores of two threads each: `n` and `n + half`.
fn threaded(half: u32) -> Vec<Vec<u32>> {
    (0..half).map(|first| vec![first, first + half]).collect()
}

fn single(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|cpu| vec![cpu]).collect()
}

fn cpus(bound: &[Result<CpuBinding, String>]) -> Vec<String> {
    bound.iter().map(|bound| bound.as_ref().map_or_else(Clone::clone, |binding| format_cpu_list(&binding.cpus))).collect()
}

#[test]
fn replicas_on_one_socket_share_its_cores_without_splitting_any() {
    let near = [vec![near("0-7,16-23")], vec![near("0-7,16-23")], vec![near("8-15,24-31")]];
    let bound = divide_cores(&near, &threaded(16));
    assert_eq!(cpus(&bound), ["0-3,16-19", "4-7,20-23", "8-15,24-31"]);
}

#[test]
fn a_replica_over_two_sockets_has_cores_of_both() {
    let bound = divide_cores(&[vec![near("0-7"), near("8-15")], vec![near("8-15")]], &single(16));
    assert_eq!(cpus(&bound), ["0-11", "12-15"]);
}

#[test]
fn replicas_get_disjoint_cores_that_cover_everything_near() {
    let near: Vec<Vec<GpuLocality>> = (0..3).map(|_| vec![near("0-10")]).collect();
    let bound = divide_cores(&near, &single(16));
    let mut all: Vec<u32> = bound.into_iter().flat_map(|bound| bound.unwrap().cpus).collect();
    all.sort_unstable();
    assert_eq!(all, (0..11).collect::<Vec<_>>());
}

#[test]
fn cpus_stay_unbound_with_a_reason_where_cores_are_few() {
    let few = divide_cores(&[vec![near("0-4")], vec![near("0-4")]], &single(16));
    assert_eq!(cpus(&few), ["its part of the cores next to its GPU is 2, and an engine wants 3", "2-4"]);
    let elsewhere = divide_cores(&[vec![near("8-15")]], &single(8));
    assert_eq!(cpus(&elsewhere), ["this process may use none of the CPUs next to its GPU"]);
    let unknown = divide_cores(&[vec![GpuLocality::default()]], &single(8));
    assert_eq!(cpus(&unknown), ["neither the driver nor the kernel says which CPUs are next to its GPU"]);
    let two_gpus = divide_cores(&[vec![near("0-2"), near("0-2")]], &single(8));
    assert_eq!(cpus(&two_gpus), ["its part of the cores next to its GPU is 3, and an engine wants 4"]);
}

#[test]
fn cpu_lists_are_read_and_written_like_the_kernels() {
    assert_eq!(parse_cpu_list(" 0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
    assert_eq!(parse_cpu_list("\n"), [0_u32; 0]);
    assert_eq!(format_cpu_list(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
    assert!(!allowed_cpus().is_empty(), "the kernel tells what this process may use");
}
