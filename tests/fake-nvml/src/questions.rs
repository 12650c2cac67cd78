//! Questions about GPUs.
//!
//! A handle of a device is a number: the index plus one, and for slices the position plus one,
//! times 1,000.
//!
//! # Safety
//! All functions have the contract of NVML's own: pointers are valid for the values that NVML's
//! documentation says are written there.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_ulonglong};
use std::ptr;
use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlFieldValue_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST as LOST,
    nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE as TOO_SMALL, nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID,
    nvmlReturn_enum_NVML_ERROR_NOT_FOUND as NOT_FOUND, nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED as RESET_REQUIRED, nvmlReturn_enum_NVML_SUCCESS as SUCCESS, nvmlReturn_t, nvmlUtilization_t,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT as UNSIGNED_INT,
};

use crate::state::{Device, Process, Slice, State};

/// Factor of slice handles, which are beyond those of GPUs.
const SLICES: usize = 1000;

/// Field numbers of NVML.
const REMAPPED_PENDING: u32 = 144;
const REMAPPED_FAILURE: u32 = 145;

/// Number of places for slices on a GPU.
const MOST_SLICES: u32 = 7;

/// Interval between two checks whether the driver still hangs.
const HANGING: Duration = Duration::from_millis(20);

/// Index that a handle stands for, and the position of the slice if it is one.
pub(crate) fn place(handle: nvmlDevice_t) -> (usize, Option<usize>) {
    let number = handle.addr();
    ((number % SLICES).wrapping_sub(1), (number / SLICES).checked_sub(1))
}

fn handle(index: usize, slice: Option<usize>) -> nvmlDevice_t {
    ptr::without_provenance_mut(index + 1 + slice.map_or(0, |slice| (slice + 1) * SLICES))
}

/// Answers a question about a handle's device, as soon as the driver does not hang.
fn ask(handle: nvmlDevice_t, question: impl FnOnce(&Device, Option<&Slice>) -> nvmlReturn_t) -> nvmlReturn_t {
    let (index, slice) = place(handle);
    loop {
        let state = State::now();
        let Some(device) = state.devices.get(index) else { return INVALID };
        if device.hangs {
            #[expect(clippy::disallowed_methods, reason = "a driver that hangs holds up its caller's thread")]
            std::thread::sleep(HANGING);
            continue;
        }
        if device.lost {
            return LOST;
        }
        if device.needs_reset {
            return RESET_REQUIRED;
        }
        return match slice {
            None => question(device, None),
            Some(position) => match device.slices.get(position) {
                Some(slice) => question(device, Some(slice)),
                None => NOT_FOUND,
            },
        };
    }
}

unsafe fn write<T>(to: *mut T, value: T) -> nvmlReturn_t {
    unsafe { to.write(value) };
    SUCCESS
}

unsafe fn write_text(to: *mut c_char, length: c_uint, text: &str) -> nvmlReturn_t {
    if text.len() >= length as usize {
        return TOO_SMALL;
    }
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    unsafe { write_text(version, length, "570.00.fake") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    unsafe { write(count, State::now().devices.len() as c_uint) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    // A lost GPU still has a handle.
    if index as usize >= State::now().devices.len() {
        return INVALID;
    }
    unsafe { write(device, handle(index as usize, None)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) -> nvmlReturn_t {
    ask(device, |device, slice| unsafe { write_text(uuid, length, slice.map_or(&device.uuid, |slice| &slice.uuid)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: c_uint) -> nvmlReturn_t {
    ask(device, |device, slice| {
        let own = if slice.is_some() { format!("{} MIG", device.name) } else { device.name.clone() };
        unsafe { write_text(name, length, &own) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) -> nvmlReturn_t {
    ask(device, |device, slice| {
        let (total, used, processes) =
            slice.map_or((device.memory, device.used, &device.processes), |slice| (slice.memory, slice.used, &slice.processes));
        let used = used + processes.iter().map(|process| process.used).sum::<u64>();
        let version = unsafe { (*memory).version };
        unsafe { write(memory, nvmlMemory_v2_t { version, total, reserved: 0, free: total.saturating_sub(used), used }) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> nvmlReturn_t {
    ask(device, |device, _| {
        if device.pci.is_empty() {
            return NOT_SUPPORTED;
        }
        unsafe {
            pci.write_bytes(0, 1);
            write_text((&raw mut (*pci).busId).cast(), 32, &device.pci)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(device: nvmlDevice_t, major: *mut c_int, minor: *mut c_int) -> nvmlReturn_t {
    ask(device, |device, _| unsafe {
        write(major, device.compute.0.cast_signed());
        write(minor, device.compute.1.cast_signed())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current: *mut c_uint, pending: *mut c_uint) -> nvmlReturn_t {
    ask(device, |device, _| {
        let divided = c_uint::from(!device.slices.is_empty());
        unsafe {
            write(current, divided);
            write(pending, divided)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut c_uint) -> nvmlReturn_t {
    ask(device, |_, _| unsafe { write(count, MOST_SLICES) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(device: nvmlDevice_t, position: c_uint, slice: *mut nvmlDevice_t) -> nvmlReturn_t {
    let (index, _) = place(device);
    ask(device, |device, _| match device.slices.get(position as usize) {
        Some(_) => unsafe { write(slice, handle(index, Some(position as usize))) },
        None => NOT_FOUND,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetP2PStatus(one: nvmlDevice_t, other: nvmlDevice_t, _: c_uint, status: *mut c_uint) -> nvmlReturn_t {
    let (other, _) = place(other);
    // 0 is good, 5 is not supported.
    ask(one, |one, _| unsafe { write(status, if one.links.iter().any(|link| *link as usize == other) { 0 } else { 5 }) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCpuAffinity(device: nvmlDevice_t, length: c_uint, words: *mut c_ulong) -> nvmlReturn_t {
    ask(device, |device, _| {
        if device.cpus.is_empty() {
            return NOT_SUPPORTED;
        }
        for at in 0..length {
            let bits = device.cpus.iter().filter(|cpu| **cpu / 64 == at).map(|cpu| 1 << (cpu % 64));
            unsafe { words.add(at as usize).write(bits.fold(0, |word, bit: c_ulong| word | bit)) };
        }
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, rates: *mut nvmlUtilization_t) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(rates, nvmlUtilization_t { gpu: device.utilisation, memory: 0 }) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, milliwatts: *mut c_uint) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(milliwatts, device.milliwatts) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, milliwatts: *mut c_uint) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(milliwatts, device.milliwatts_limit) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, _: c_uint, mhz: *mut c_uint) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(mhz, device.sm_mhz) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTemperature(device: nvmlDevice_t, _: c_uint, celsius: *mut c_uint) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(celsius, device.celsius) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(device: nvmlDevice_t, reasons: *mut c_ulonglong) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(reasons, device.throttled) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(device: nvmlDevice_t, kind: c_uint, _: c_uint, count: *mut c_ulonglong) -> nvmlReturn_t {
    ask(device, |device, _| unsafe { write(count, if kind == 0 { device.corrected } else { device.uncorrected }) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(device: nvmlDevice_t, count: c_int, values: *mut nvmlFieldValue_t) -> nvmlReturn_t {
    ask(device, |device, _| {
        for at in 0..usize::try_from(count).unwrap_or(0) {
            let value = unsafe { &mut *values.add(at) };
            let (known, set) = match value.fieldId {
                REMAPPED_PENDING => (SUCCESS, device.remap_pending),
                REMAPPED_FAILURE => (SUCCESS, device.remap_failed),
                _ => (NOT_SUPPORTED, false),
            };
            value.nvmlReturn = known;
            value.valueType = UNSIGNED_INT;
            value.value.uiVal = c_uint::from(set);
        }
        SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    processes: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    ask(device, |device, slice| {
        let all: Vec<Process> = match slice {
            Some(slice) => slice.processes.clone(),
            None => device.processes.iter().chain(device.slices.iter().flat_map(|slice| &slice.processes)).cloned().collect(),
        };
        let room = unsafe { count.replace(all.len() as c_uint) } as usize;
        if room < all.len() {
            return TOO_SMALL;
        }
        for (at, process) in all.iter().enumerate() {
            let occupant = nvmlProcessInfo_t {
                pid: process.pid,
                usedGpuMemory: process.used,
                gpuInstanceId: c_uint::MAX,
                computeInstanceId: c_uint::MAX,
            };
            unsafe { processes.add(at).write(occupant) };
        }
        SUCCESS
    })
}
