use std::time::Duration;

use super::*;

#[test]
fn cpu_time_is_read_behind_a_misleading_process_name() {
    let stat = "7 (a) S 1 2) R 1 7 7 0 -1 4194304 100 0 0 0 31 11 0 0 20 0 4 0 5 6 7";
    assert_eq!(parse_cpu_ticks(stat), Some(42));
    assert_eq!(parse_cpu_ticks("7 (a) R 1"), None);
}

#[test]
fn computing_processes_use_a_core_and_waiting_ones_none() {
    let (own, mut cpu, began) = (std::process::id(), FrontEndCpu::default(), std::time::Instant::now());
    let start = Instant::now();
    assert_eq!(cpu.read(own, start), None, "one reading tells nothing yet");
    // Wait until the kernel has counted some ticks for this process.
    let before = parse_cpu_ticks(&read_stat(own).unwrap()).unwrap();
    while parse_cpu_ticks(&read_stat(own).unwrap()).unwrap() < before + 10 && began.elapsed() < Duration::from_secs(30) {}
    let share = cpu.read(own, start + Duration::from_secs(1)).unwrap();
    assert!(share > 0.05, "{share}");
    assert_eq!(cpu.read(u32::MAX, start + Duration::from_secs(2)), None, "no such process");
}
