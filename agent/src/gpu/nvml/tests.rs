//! Interpretation of a failure to load the driver's library.

use super::*;

fn missing() -> NvmlError {
    Nvml::builder().lib_path("/nonexistent/libnvidia-ml.so.1".as_ref()).init().unwrap_err()
}

#[test]
fn a_host_without_a_driver_has_no_gpus() {
    assert_eq!(classify_load_error(&missing(), false, false), LibraryError::Absent);
    assert_eq!(classify_load_error(&NvmlError::DriverNotLoaded, false, false), LibraryError::Absent);
}

#[test]
fn a_driver_without_its_library_is_an_error() {
    let LibraryError::Broken(reason) = classify_load_error(&missing(), false, true) else { panic!("a container would run on the CPU") };
    assert!(reason.contains("NVIDIA_DRIVER_CAPABILITIES=compute,utility"), "{reason}");
    assert!(matches!(classify_load_error(&NvmlError::DriverNotLoaded, false, true), LibraryError::Broken(_)));
}

#[test]
fn a_library_named_by_a_setting_is_judged_by_itself() {
    assert_eq!(classify_load_error(&missing(), true, true), LibraryError::Absent);
    assert!(matches!(classify_load_error(&NvmlError::DriverNotLoaded, true, false), LibraryError::Broken(_)));
}
