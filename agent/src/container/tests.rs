//! The runtime's command, and the settings that lead to none.

use std::os::unix::fs::PermissionsExt;

use super::*;

fn container(has_nvidia: bool) -> Container {
    Container { runtime: "/usr/bin/apptainer".into(), image: "/soft/vllm.sif".into(), has_nvidia, binds: Vec::new() }
}

fn spoken(words: &[OsString]) -> String {
    words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_command_names_devices_then_files_then_the_image() {
    let paths = ["/dev/shm", "/models/m", "/tmp/hostler-7", "/models/m"].map(PathBuf::from);
    let table = [
        (container(false), "/usr/bin/apptainer exec /soft/vllm.sif"),
        (container(true), "/usr/bin/apptainer exec --nv /soft/vllm.sif"),
        (
            container(true).with_binds(paths).unwrap(),
            "/usr/bin/apptainer exec --nv --bind /dev/shm --bind /models/m --bind /tmp/hostler-7 /soft/vllm.sif",
        ),
    ];
    for (container, expected) in table {
        assert_eq!(spoken(&container.words()), expected);
    }
}

#[test]
fn a_path_that_the_runtime_would_split_is_refused() {
    for path in ["/models/a,b", "/models/a:ro"] {
        let error = container(false).with_binds([path.into()]).unwrap_err();
        assert_eq!(error, ContainerError::Unbindable { path: path.into() });
    }
}

#[test]
fn programs_in_the_container_get_nothing_of_the_hosts_python() {
    let command = command(Some(&container(false)), OsStr::new("vllm"));
    let command = command.as_std();
    let arguments: Vec<_> = command.get_args().collect();
    assert_eq!(
        (command.get_program(), arguments.as_slice()),
        (OsStr::new("/usr/bin/apptainer"), &["exec", "/soft/vllm.sif", "vllm"].map(OsStr::new)[..])
    );
    let set: std::collections::BTreeMap<_, _> = command.get_envs().collect();
    assert_eq!(set[OsStr::new("PYTHONPATH")], None);
    assert_eq!(set[OsStr::new("LD_PRELOAD")], None);
    assert_eq!(set[OsStr::new("PYTHONNOUSERSITE")], Some(OsStr::new("1")));
    assert!(!set.contains_key(OsStr::new("HF_HOME")), "others are inherited");
}

#[test]
fn a_program_without_a_container_is_run_as_it_is() {
    let command = command(None, OsStr::new("/venv/bin/vllm"));
    assert_eq!(command.as_std().get_program(), "/venv/bin/vllm");
    assert_eq!(command.as_std().get_envs().count(), 0);
}

#[test]
fn the_first_runtime_on_the_path_is_taken() {
    let place = tempfile::tempdir().unwrap();
    let path = Some(place.path().as_os_str());
    let missing = find_runtime(Path::new(""), path).unwrap_err();
    assert!(matches!(&missing, ContainerError::NoRuntime { name, .. } if name == "`apptainer` or `singularity`"), "{missing}");
    for name in ["singularity", "apptainer"] {
        let program = place.path().join(name);
        fs::write(&program, "").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_runtime(Path::new(""), path), Ok(program));
    }
    assert!(matches!(find_runtime(Path::new("/nowhere/apptainer"), path), Err(ContainerError::NoRuntime { .. })));
    assert!(matches!(find_runtime(Path::new("/usr/bin/podman-hpc"), path), Err(ContainerError::OtherRuntime { .. })));
}

#[test]
fn an_image_is_a_file_or_folder_of_this_host() {
    let place = tempfile::tempdir().unwrap();
    let image = place.path().join("vllm.sif");
    assert!(matches!(find_image(&image), Err(ContainerError::NoImage { .. })));
    fs::write(&image, "").unwrap();
    assert_eq!(find_image(&image), Ok(image));
    assert_eq!(find_image(place.path()), Ok(place.path().to_owned()));
    let remote = find_image(Path::new("docker://vllm/vllm-openai")).unwrap_err().to_string();
    assert!(remote.contains("apptainer pull vllm.sif docker://vllm/vllm-openai"), "{remote}");
}

#[test]
fn a_runtime_without_an_image_is_a_mistake() {
    let config = |image: &str, runtime: &str| AgentConfig { image: image.into(), container: runtime.into(), ..AgentConfig::default() };
    assert_eq!(Container::of(&config("", "")), Ok(None));
    assert_eq!(Container::of(&config("", "apptainer")), Err(ContainerError::NoImageNamed));
}
