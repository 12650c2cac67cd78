//! Events of the fake driver.
//!
//! Each XID that is appended to a device's list in the file is sent once to every set that the
//! device was registered with before.
//!
//! # Safety
//! Same as for `questions`.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_TIMEOUT as TIMEOUT, nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t,
};

use crate::questions::place;
use crate::state::State;

/// NVML's bit for an XID.
const XID: u64 = 8;

/// Longest wait that is granted.
const LONGEST_WAIT_MS: c_uint = 10;

/// Interval between two reads of the file.
const LOOK: Duration = Duration::from_millis(1);

/// Each device of a set, with the number of its XIDs that were sent or are older than the set.
#[derive(Default)]
struct Set(Vec<(nvmlDevice_t, usize)>);

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
    unsafe { set.write(Box::into_raw(Box::<Set>::default()).cast()) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetFree(set: nvmlEventSet_t) -> nvmlReturn_t {
    drop(unsafe { Box::from_raw(set.cast::<Set>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, _: c_ulonglong, set: nvmlEventSet_t) -> nvmlReturn_t {
    let delivered = State::now().devices.get(place(device).0).map_or(0, |device| device.xids.len());
    unsafe { &mut *set.cast::<Set>() }.0.push((device, delivered));
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout_ms: c_uint) -> nvmlReturn_t {
    // A real driver may use a whole core while it waits, so no caller may wait for long.
    if timeout_ms > LONGEST_WAIT_MS {
        return INVALID_ARGUMENT;
    }
    let set = unsafe { &mut *set.cast::<Set>() };
    let until = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        let state = State::now();
        for (device, delivered) in &mut set.0 {
            let Some(xid) = state.devices.get(place(*device).0).and_then(|device| device.xids.get(*delivered)) else { continue };
            *delivered += 1;
            let event = nvmlEventData_t { device: *device, eventType: XID, eventData: *xid, gpuInstanceId: 0, computeInstanceId: 0 };
            unsafe { data.write(event) };
            return SUCCESS;
        }
        if Instant::now() >= until {
            return TIMEOUT;
        }
        #[expect(clippy::disallowed_methods, reason = "NVML blocks its caller's thread")]
        std::thread::sleep(LOOK);
    }
}
