//! Tables for every decision about the host.

use super::*;

fn vllm() -> EngineProgram {
    EngineProgram::Vllm { program: "/opt/vllm".into() }
}

fn simulated() -> EngineProgram {
    EngineProgram::Simulated { program: "/opt/hostler".into() }
}

fn lookup(found: bool) -> ProgramLookup {
    ProgramLookup { name: "vllm".into(), searched: "that name in PATH=/bin".to_owned(), found: found.then(|| "/opt/vllm".into()) }
}

#[test]
fn the_engine_kind_follows_from_what_is_given_and_found() {
    let no_vllm = || Err(HostError::NoVllm { name: "vllm".to_owned(), searched: "that name in PATH=/bin".to_owned() });
    let table = [
        (EngineKind::Auto, false, false, Ok(simulated())),
        (EngineKind::Auto, false, true, Err(HostError::NoModel)),
        (EngineKind::Auto, true, false, no_vllm()),
        (EngineKind::Auto, true, true, Ok(vllm())),
        (EngineKind::Vllm, false, false, Err(HostError::NoModel)),
        (EngineKind::Vllm, false, true, Err(HostError::NoModel)),
        (EngineKind::Vllm, true, false, no_vllm()),
        (EngineKind::Vllm, true, true, Ok(vllm())),
        (EngineKind::Simulated, true, true, Ok(simulated())),
        (EngineKind::Simulated, false, false, Ok(simulated())),
    ];
    for (kind, model_given, found, expected) in table {
        let resolved = choose_program(kind, model_given, &lookup(found), Path::new("/opt/hostler"));
        assert_eq!(resolved, expected, "{kind:?} {model_given} {found}");
    }
}

#[test]
fn a_program_is_looked_up_by_path_or_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm");
    let search = directory.path().as_os_str();
    let name = Path::new("vllm");

    let missing = find_program(name, Some(search));
    assert_eq!(missing.found, None);
    assert!(missing.searched.contains(search.to_str().unwrap()));

    fs::write(&path, "").unwrap();
    assert_eq!(find_program(name, Some(search)).found, None, "not executable");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(find_program(name, Some(search)).found, Some(path.clone()));
    assert_eq!(find_program(&path, None).found, Some(path));
    assert_eq!(find_program(name, None).found, None);
}
