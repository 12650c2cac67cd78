use super::*;

fn engine() -> CommandLine {
    CommandLine {
        container: Vec::new(),
        program: "/venv/bin/vllm".into(),
        arguments: vec!["serve".into(), "m".into()],
        set: vec![
            ("VLLM_RPC_BASE_PATH", "/run/e0".into()),
            ("TMPDIR", "/run/e0/tmp".into()),
            ("VLLM_SERVER_DEV_MODE", "1".into()),
            ("CUDA_VISIBLE_DEVICES", "GPU-1".into()),
            ("PYTHONPATH", "/run/e0/python".into()),
        ],
        unset: vec!["VLLM_PORT"],
        withheld_routes: &[],
    }
}

#[test]
fn a_spare_has_the_engines_variables_but_for_those_of_one_engine() {
    let spare =
        spare_command(Some(VllmVersion::new(0, 33)), Some(Path::new("/venv/bin/python")), &engine(), Path::new("/run/spares")).unwrap();
    assert_eq!(spare.program, Path::new("/venv/bin/python"));
    assert_eq!(spare.arguments, ["/run/spares/hostler_start.py"]);
    assert_eq!(spare.set, [("VLLM_SERVER_DEV_MODE", "1".into()), ("VLLM_RPC_BASE_PATH", "/run/spares".into())]);
    assert_eq!(spare.unset, ["VLLM_PORT"]);
}

#[test]
fn only_tried_releases_whose_python_is_known_start_from_a_spare() {
    let (python, directory) = (Some(Path::new("/python")), Path::new("/run/spares"));
    for (version, interpreter) in [(None, python), (Some(VllmVersion::new(0, 24)), python), (Some(VllmVersion::new(0, 33)), None)] {
        assert!(spare_command(version, interpreter, &engine(), directory).is_err(), "{version:?} {interpreter:?}");
    }
}

#[test]
fn engines_of_one_gpu_fork_unless_vllm_would_refuse() {
    let arguments = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert!(may_fork(0, &[]) && may_fork(1, &arguments("--max-model-len 2048")));
    assert!(!may_fork(2, &[]));
    assert!(!may_fork(1, &arguments("--mm-tensor-ipc torch_shm")) && !may_fork(1, &arguments("--numa-bind")));
}
