//! Discovery through the real library's interface, with the fake driver of `tests/fake-nvml` in its
//! place.

use hostler_fake_nvml::{Device, Fake, Process, Slice};
use tempfile::TempDir;

use super::*;
use crate::gpu::{GpuAvailability, StartObstacle};

fn device(uuid: &str) -> Device {
    Device { uuid: uuid.to_owned(), ..Device::default() }
}

async fn open(devices: Vec<Device>) -> (TempDir, Fake, GpuDriver) {
    let directory = tempfile::tempdir().unwrap();
    let fake = Fake::install(directory.path(), devices);
    let driver = GpuDriver::open(Some(fake.library())).await.unwrap();
    (directory, fake, driver)
}

#[tokio::test]
async fn gpus_are_described_though_one_of_them_is_lost() {
    let first = Device { pci: "00000000:1B:00.0".to_owned(), cpus: (64..72).collect(), ..device("GPU-aa") };
    let lost = Device { lost: true, ..device("GPU-bb") };
    let (_directory, _fake, driver) = open(vec![first, lost, device("GPU-cc")]).await;
    assert_eq!(driver.version(), "570.00.fake");
    let found: Vec<_> = driver.gpus().iter().map(|gpu| (gpu.index, gpu.uuid.as_str(), gpu.pci.as_str())).collect();
    assert_eq!(found, [(0, "GPU-aa", "0000:1b:00.0"), (2, "GPU-cc", "")]);
    assert_eq!((driver.gpus()[0].memory_bytes, driver.gpus()[0].compute), (80 << 30, Some((9, 0))));
    assert_eq!(driver.locality(&driver.gpus()[0]), GpuLocality::of("", (64..72).collect()));
}

#[tokio::test]
async fn only_gpus_fully_joined_by_nvlink_form_one_domain() {
    let linked = |uuid: &str, links: &[u32]| Device { links: links.to_vec(), ..device(uuid) };
    let (_directory, _fake, driver) = open(vec![linked("GPU-a", &[1]), linked("GPU-b", &[0]), linked("GPU-c", &[])]).await;
    let gpus = driver.gpus();
    assert!(driver.links().is_one_domain(&gpus[..2]));
    assert!(!driver.links().is_one_domain(&gpus[1..]));
    assert!(!driver.links().is_one_domain(gpus));
    assert!(driver.links().is_one_domain(&gpus[2..]), "one GPU needs no link");
}

#[tokio::test]
async fn a_divided_gpu_is_replaced_by_its_slices() {
    let slice = |uuid: &str, gib: u64| Slice { uuid: uuid.to_owned(), memory: gib << 30, ..Slice::default() };
    let divided = Device { slices: vec![slice("MIG-1", 40), slice("MIG-2", 20)], ..device("GPU-bb") };
    let (_directory, _fake, driver) = open(vec![device("GPU-aa"), divided]).await;
    let found: Vec<_> = driver.gpus().iter().map(|gpu| (gpu.index, gpu.uuid.as_str(), gpu.whole_uuid(), gpu.memory_bytes >> 30)).collect();
    assert_eq!(found, [(0, "GPU-aa", "GPU-aa", 80), (1, "MIG-1", "GPU-bb", 40), (1, "MIG-2", "GPU-bb", 20)]);
    assert!(!driver.links().is_one_domain(&driver.gpus()[1..]), "slices do not reach each other");
}

#[tokio::test]
async fn missing_libraries_mean_no_driver_and_wrong_ones_are_broken() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.so");
    assert_eq!(GpuDriver::open(Some(&missing)).await.unwrap_err(), DriverError::Absent);
    // Load a C library that has none of the functions.
    let other = std::fs::read_to_string("/proc/self/maps").unwrap();
    let other = other.lines().find_map(|line| line.find('/').map(|at| &line[at..]).filter(|path| path.contains("libc.so"))).unwrap();
    assert!(matches!(GpuDriver::open(Some(Path::new(other))).await, Err(DriverError::Broken(_))));
}

#[tokio::test]
async fn a_leftover_process_keeps_its_gpu_until_it_is_gone() {
    let occupied = Device { processes: vec![Process { pid: 4_000_000, used: 61 << 30 }], ..device("GPU-bb") };
    let (_directory, mut fake, driver) = open(vec![device("GPU-aa"), occupied]).await;
    let free = |index: usize| GpuAvailability::new(driver.clone(), vec![driver.gpus()[index].clone()], 0.92);
    free(0).check().await.unwrap();
    let StartObstacle { in_use, cause, .. } = free(1).check().await.unwrap_err();
    assert!(in_use && cause.contains("GPU 1 is in use by process 4000000") && cause.contains("61.0 GiB"), "{cause}");
    fake.change(1, |device| device.processes.clear());
    free(1).check().await.unwrap();
    fake.change(1, |device| device.processes.push(Process { pid: 4_000_000, used: 30 << 20 }));
    free(1).check().await.unwrap();
    // A process in another container uses memory, and the driver does not name it here.
    fake.change(1, |device| (device.used, device.processes) = (61 << 30, Vec::new()));
    let StartObstacle { in_use, cause, .. } = free(1).check().await.unwrap_err();
    assert!(in_use && cause.contains("processes that are not visible from here: 19.0 GiB are free"), "{cause}");
    fake.change(1, |device| device.lost = true);
    let StartObstacle { in_use, cause, .. } = free(1).check().await.unwrap_err();
    assert!(!in_use && cause.contains("GPU 1 is lost"), "{cause}");
}

#[tokio::test]
async fn a_hanging_query_holds_up_only_its_own_gpu() {
    let (_directory, mut fake, driver) = open(vec![device("GPU-aa"), device("GPU-bb")]).await;
    fake.change(0, |device| device.hangs = true);
    let ask = |index: usize| {
        let (whole, gpus) = (&driver.shared.whole_gpus[index], vec![driver.gpus()[index].clone()]);
        let number = gpus[0].index;
        whole.ask(move |driver| nvml::read(driver, number, &gpus))
    };
    let mut hanging = std::pin::pin!(ask(0));
    tokio::select! {
        biased;
        _ = &mut hanging => panic!("the driver hangs"),
        other = ask(1) => assert_eq!(other.unwrap().1[0].celsius, Some(45)),
    }
    fake.change(0, |device| device.hangs = false);
    assert_eq!(hanging.await.unwrap().0, nvml::GpuHealth::Reachable);
}

#[tokio::test]
async fn readings_show_figures_and_slices_have_their_own_memory() {
    let slice = Slice { uuid: "MIG-1".to_owned(), memory: 40 << 30, used: 7 << 30, ..Slice::default() };
    let divided = Device { slices: vec![slice], throttled: 0x04 | 0x01, corrected: 3, remap_pending: true, ..device("GPU-aa") };
    let (_directory, mut fake, driver) = open(vec![divided]).await;
    let read = || {
        driver.shared.whole_gpus[0].ask({
            let gpus = driver.gpus().to_vec();
            move |driver| nvml::read(driver, 0, &gpus)
        })
    };
    let (standing, readings) = read().await.unwrap();
    assert_eq!(standing, nvml::GpuHealth::Reachable);
    let reading = &readings[0];
    assert_eq!((reading.uuid.as_str(), reading.memory_used_bytes, reading.utilisation), ("MIG-1", Some(7 << 30), None));
    assert_eq!((reading.watts, reading.watts_limit, reading.sm_mhz), (Some(300.0), Some(700.0), Some(1_980)));
    assert_eq!(reading.throttled, ["power limit"]);
    assert_eq!((reading.ecc_corrected, reading.ecc_uncorrected), (Some(3), Some(0)));
    assert!(reading.remap_pending && !reading.remap_failed);
    fake.change(0, |device| device.needs_reset = true);
    assert_eq!(read().await.unwrap().0, nvml::GpuHealth::NeedsReset);
}
