//! What it means that the driver's library does not load.

use super::*;

fn missing() -> NvmlError {
    Nvml::builder().lib_path("/nonexistent/libnvidia-ml.so.1".as_ref()).init().unwrap_err()
}

#[test]
fn a_host_without_a_driver_has_no_gpus_whether_or_not_the_library_is_installed() {
    assert_eq!(why_not(&missing(), false, false), NoLibrary::Absent);
    assert_eq!(why_not(&NvmlError::DriverNotLoaded, false, false), NoLibrary::Absent);
}

#[test]
fn a_driver_without_its_library_is_not_taken_for_a_host_without_gpus() {
    let NoLibrary::Broken(reason) = why_not(&missing(), false, true) else { panic!("a container would run on the CPU") };
    assert!(reason.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{reason}");
    assert!(matches!(why_not(&NvmlError::DriverNotLoaded, false, true), NoLibrary::Broken(_)));
}

#[test]
fn a_library_that_was_named_is_judged_by_itself() {
    assert_eq!(why_not(&missing(), true, true), NoLibrary::Absent);
    assert!(matches!(why_not(&NvmlError::DriverNotLoaded, true, false), NoLibrary::Broken(_)));
}
