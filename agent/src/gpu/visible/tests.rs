//! Tables for the variable that gives a job its GPUs.

use super::*;
use crate::gpu::MigSlice;

fn gpu(index: u32, uuid: &str) -> Gpu {
    Gpu { index, uuid: uuid.to_owned(), ..Gpu::default() }
}

fn slice(index: u32, uuid: &str, parent: &str) -> Gpu {
    Gpu { slice: Some(MigSlice { parent: parent.to_owned(), position: 0 }), ..gpu(index, uuid) }
}

type Expected = Result<&'static [&'static str], &'static str>;

fn check(devices: &[Gpu], visible: Option<&str>, expected: Expected) {
    match (select(devices, visible), expected) {
        (Ok(selection), Ok(expected)) => {
            let uuids: Vec<&str> = selection.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
            assert_eq!(uuids, expected, "{visible:?}");
        }
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
        (got, _) => panic!("{visible:?} gave {got:?}"),
    }
}

#[test]
fn visible_devices_select_by_position_or_by_uuid_prefix() {
    let devices = [gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33")];
    let table: [(Option<&str>, Expected); 13] = [
        (None, Ok(&["GPU-aa11", "GPU-aa22", "GPU-bb33"])),
        (Some("2,0"), Ok(&["GPU-bb33", "GPU-aa11"])),
        (Some(" 1 , 2 "), Ok(&["GPU-aa22", "GPU-bb33"])),
        (Some("GPU-bb"), Ok(&["GPU-bb33"])),
        (Some("GPU-aa22,0"), Ok(&["GPU-aa22", "GPU-aa11"])),
        (Some("1,1"), Ok(&["GPU-aa22"])),
        (Some("0,-1,2"), Ok(&["GPU-aa11"])),
        (Some(""), Err("ask the scheduler for GPUs")),
        (Some("NoDevFiles"), Err("ask the scheduler for GPUs")),
        (Some("-1"), Err("--engine simulated")),
        (Some("GPU-aa"), Err("several")),
        (Some("3"), Err("0 (GPU-aa11), 1 (GPU-aa22), 2 (GPU-bb33)")),
        (Some("MIG-1234"), Err("MIG-1234")),
    ];
    for (visible, expected) in table {
        check(&devices, visible, expected);
    }
}

#[test]
fn visible_devices_end_at_an_unknown_entry_that_is_named() {
    let devices = [gpu(0, "GPU-aa"), gpu(1, "GPU-bb")];
    let selection = select(&devices, Some("0,7,1")).unwrap();
    assert_eq!(selection, GpuSelection { gpus: vec![devices[0].clone()], unknown_entry: Some("7".to_owned()) });
    assert_eq!(select(&devices, Some("0,-1,1")).unwrap().unknown_entry, None, "that is a limit somebody set");
}

#[test]
fn slices_are_selected_singly_and_a_divided_gpu_selects_all() {
    let devices = [gpu(0, "GPU-aa"), slice(1, "MIG-11", "GPU-bb"), slice(1, "MIG-12", "GPU-bb")];
    let table: [(Option<&str>, Expected); 7] = [
        (None, Ok(&["GPU-aa", "MIG-11", "MIG-12"])),
        (Some("MIG-12"), Ok(&["MIG-12"])),
        (Some("MIG-12,0"), Ok(&["MIG-12", "GPU-aa"])),
        (Some("1"), Ok(&["MIG-11", "MIG-12"])),
        (Some("GPU-bb"), Ok(&["MIG-11", "MIG-12"])),
        (Some("MIG-1"), Err("several")),
        (Some("MIG-3"), Err("1 (MIG-11)")),
    ];
    for (visible, expected) in table {
        check(&devices, visible, expected);
    }
}

#[test]
fn a_slice_is_passed_to_an_engine_only_by_uuid() {
    let whole = gpu(3, "GPU-aa");
    let slice = slice(3, "MIG-11", "GPU-aa");
    assert_eq!(whole.visible_entry(true).unwrap(), "GPU-aa");
    assert_eq!(whole.visible_entry(false).unwrap(), "3");
    assert_eq!(slice.visible_entry(true).unwrap(), "MIG-11");
    let error = slice.visible_entry(false).unwrap_err();
    assert!(error.to_string().contains("vLLM 0.24"), "{error}");
}
