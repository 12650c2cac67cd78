//! Versions as real releases print them, and programs that misbehave.

use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn the_last_line_that_is_a_version_counts() {
    let table = [
        ("0.32.0+cpu\n", Some((0, 32, 0))),
        ("0.11.0", Some((0, 11, 0))),
        ("0.24.1rc2.dev5+g1a2b3c", Some((0, 24, 1))),
        ("0.19rc1", Some((0, 19, 0))),
        ("vllm 0.18.2\n", Some((0, 18, 2))),
        ("W1121 triton not found\nsomething 1.2.3 else\n0.33.0\n", Some((0, 33, 0))),
        ("Traceback (most recent call last):\nImportError: no torch", None),
        ("", None),
    ];
    for (output, expected) in table {
        let parsed = VllmVersion::parse(output).map(|v| (v.major, v.minor, v.patch));
        assert_eq!(parsed, expected, "{output:?}");
    }
}

#[test]
fn versions_compare_by_their_numbers() {
    assert!(VllmVersion::new(0, 9) < VllmVersion::new(0, 18));
    assert!(VllmVersion::parse("0.24.1").unwrap() > VllmVersion::new(0, 24));
}

fn program(text: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vllm");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (directory, path)
}

#[tokio::test]
async fn a_program_is_asked_for_its_version() {
    let (_directory, path) = program("#!/bin/sh\necho warning >&2\necho 0.32.0+cpu\n");
    assert_eq!(read_interpreter(&path), None);
    assert_eq!(
        probe(&path).await.unwrap(),
        InstalledVllm {
            version: VllmVersion::new(0, 32),
            interpreter: None,
            lacks_bytecode: false,
            rust_front_end: None,
            has_opentelemetry: false,
            parsers: InstalledParsers::default()
        }
    );
}

#[test]
fn an_executable_rust_front_end_is_found_beside_the_package() {
    let (directory, path) = program("");
    let output = format!("warning\nfolder {}\n0.32.0\n", directory.path().display());
    assert_eq!(find_rust_front_end(&output), None);
    let binary = path.with_file_name("vllm-rs");
    std::fs::write(&binary, "").unwrap();
    assert_eq!(find_rust_front_end(&output), None, "not executable");
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(find_rust_front_end(&output), Some(binary));
}

#[tokio::test]
async fn a_program_without_a_version_is_reported_with_its_output() {
    let (_directory, path) = program("#!/bin/sh\necho no torch >&2\nexit 3\n");
    let error = probe(&path).await.unwrap_err().to_string();
    assert!(error.contains("exit status: 3"), "{error}");
    assert!(error.contains("no torch"), "{error}");
}

#[tokio::test]
async fn a_program_that_hangs_is_killed_at_the_deadline() {
    let (_directory, path) = program("#!/bin/sh\nsleep 600 & sleep 600\n");
    let error = run_program(&path, &[], Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(error, VllmVersionError::Timeout { .. }));
}

#[test]
fn only_an_absolute_python_counts_as_the_interpreter() {
    let (_directory, path) = program("#!/opt/venv/bin/python3.12\nimport sys\n");
    let expected = Path::new("/opt/venv/bin/python3.12");
    assert_eq!(read_interpreter(&path).as_deref(), Some(expected));
    let (_directory, path) = program("#!/usr/bin/env python3\n");
    assert_eq!(read_interpreter(&path), None);
}

#[test]
fn only_the_script_that_vllm_installs_is_its_own() {
    let own =
        "#!/venv/bin/python\nimport sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n";
    let (_directory, own) = program(own);
    let (_other, wrapper) = program("#!/venv/bin/python\nimport os\nos.nice(5)\nos.execv('/venv/bin/vllm', ['vllm'])\n");
    assert!(is_own_script(&own) && !is_own_script(&wrapper));
}
