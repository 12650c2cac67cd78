//! CPU cores for each engine: those next to its GPUs, as far as this process may use them, divided
//! among the engines that share them.
//!
//! The division is pure; the rest reads sysfs.

use std::collections::BTreeMap;
use std::fs;

use super::locality::{GpuLocality, parse_cpu_list};
use super::{Gpu, GpuDriver};

/// Cores that a vLLM engine wants beside one for each of its GPUs: its front-end and its scheduler.
const CORES_BESIDE_GPUS: usize = 2;

/// CPUs for an engine's whole process tree.
///
/// Its memory comes from the same NUMA node, because the kernel allocates memory where it is first
/// used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuBinding {
    /// CPU numbers of the kernel, ascending; never empty.
    pub cpus: Vec<u32>,
}

/// CPU bindings of the replicas' engines, in the order of `replicas`, each given by its GPUs.
///
/// The log explains which engines are not bound.
pub(crate) fn plan_cpu_bindings(driver: &GpuDriver, replicas: &[Vec<Gpu>]) -> Vec<Option<CpuBinding>> {
    let near: Vec<Vec<GpuLocality>> = replicas.iter().map(|gpus| gpus.iter().map(|gpu| driver.locality(gpu)).collect()).collect();
    let bound = divide_cores(&near, &cores(&allowed_cpus()));
    for (replica, bound) in bound.iter().enumerate() {
        match bound {
            Ok(binding) => {
                tracing::info!(replica, cpus = %format_cpu_list(&binding.cpus), "bound to the CPUs next to its GPU");
            }
            Err(reason) => tracing::info!(replica, reason, "not bound to CPUs"),
        }
    }
    bound.into_iter().map(Result::ok).collect()
}

/// Divides cores, each given by its CPUs, among replicas, each given by the locality of its GPUs.
///
/// A core goes to one of the replicas next to it, so that replicas with the same neighbours get
/// equal parts.
fn divide_cores(near: &[Vec<GpuLocality>], cores: &[Vec<u32>]) -> Vec<Result<CpuBinding, String>> {
    let is_near = |gpus: &[GpuLocality], core: &[u32]| gpus.iter().any(|gpu| core.iter().any(|cpu| gpu.cpus.contains(cpu)));
    let mut classes: BTreeMap<Vec<usize>, Vec<&Vec<u32>>> = BTreeMap::new();
    for core in cores {
        let claims: Vec<usize> = (0..near.len()).filter(|&replica| is_near(&near[replica], core)).collect();
        classes.entry(claims).or_default().push(core);
    }
    let mut parts: Vec<Vec<&Vec<u32>>> = vec![Vec::new(); near.len()];
    for (claims, cores) in &classes {
        for (at, &replica) in claims.iter().enumerate() {
            // Neighbouring cores stay together because they share caches.
            let (from, to) = (at * cores.len() / claims.len(), (at + 1) * cores.len() / claims.len());
            parts[replica].extend(&cores[from..to]);
        }
    }
    near.iter().zip(parts).map(|(gpus, part)| bind_near(gpus, &part)).collect()
}

fn bind_near(gpus: &[GpuLocality], part: &[&Vec<u32>]) -> Result<CpuBinding, String> {
    if gpus.iter().all(|gpu| gpu.cpus.is_empty()) {
        return Err("neither the driver nor the kernel says which CPUs are next to its GPU".to_owned());
    }
    if part.is_empty() {
        return Err("this process may use none of the CPUs next to its GPU".to_owned());
    }
    let needed = CORES_BESIDE_GPUS + gpus.len();
    if part.len() < needed {
        return Err(format!("its part of the cores next to its GPU is {}, and an engine wants {needed}", part.len()));
    }
    let mut cpus: Vec<u32> = part.iter().flat_map(|core| core.iter().copied()).collect();
    cpus.sort_unstable();
    Ok(CpuBinding { cpus })
}

/// CPUs that this process may use: those of its cgroup, minus those that other bindings exclude.
fn allowed_cpus() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).map(parse_cpu_list).unwrap_or_default()
}

/// Cores of these CPUs. Each core lists only those of its CPUs that are among them.
fn cores(cpus: &[u32]) -> Vec<Vec<u32>> {
    let mut cores: Vec<Vec<u32>> = Vec::new();
    for &cpu in cpus {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let mut core = fs::read_to_string(path).map(|list| parse_cpu_list(&list)).unwrap_or_default();
        core.retain(|sibling| cpus.contains(sibling));
        match core.first() {
            None => cores.push(vec![cpu]),
            Some(&first) if first == cpu => cores.push(core),
            // The core was already added with its first thread.
            Some(_) => {}
        }
    }
    cores
}

/// Formats a list that `parse_cpu_list` reads.
fn format_cpu_list(cpus: &[u32]) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let word = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.iter().map(word).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
