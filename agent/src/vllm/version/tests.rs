//! Versions as real releases print them, and programs that misbehave.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::config::AgentConfig;

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

/// A `vllm` with this text after its first line, which names a Python that prints the lines below.
fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
    let (directory, python) = program("#!/bin/sh\necho 'rust front-end /lib/vllm-rs'\necho opentelemetry\necho no bytecode\necho 0.32.1\n");
    std::fs::rename(&python, directory.path().join("python3.12")).unwrap();
    let path = directory.path().join("vllm");
    std::fs::write(&path, format!("#!{}/python3.12\n{text}", directory.path().display())).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (directory, path)
}

#[tokio::test]
async fn a_program_is_asked_for_its_version() {
    let (_directory, path) = program("#!/bin/sh\necho warning >&2\necho 0.32.0+cpu\n");
    assert_eq!(probe(&path, None).await.unwrap(), InstalledVllm::of_version(VllmVersion::new(0, 32)));
}

#[tokio::test]
async fn the_python_in_the_first_line_says_what_the_package_has() {
    let own = "import sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n";
    let (directory, path) = script(own);
    let expected = InstalledVllm {
        version: VllmVersion { major: 0, minor: 32, patch: 1 },
        interpreter: Some(directory.path().join("python3.12")),
        lacks_bytecode: true,
        rust_front_end: Some("/lib/vllm-rs".into()),
        has_opentelemetry: true,
        parsers: InstalledParsers::default(),
    };
    assert_eq!(probe(&path, None).await.unwrap(), expected);
    let (_directory, wrapper) = script("import os\nos.nice(5)\nos.execv('/venv/bin/vllm', ['vllm'])\n");
    assert_eq!(probe(&wrapper, None).await.unwrap(), InstalledVllm { interpreter: None, ..expected }, "a wrapper does more than call vLLM");
}

#[tokio::test]
async fn a_program_without_a_version_is_reported_with_its_output() {
    let (_directory, path) = program("#!/bin/sh\necho no torch >&2\nexit 3\n");
    let error = probe(&path, None).await.unwrap_err().to_string();
    assert!(error.contains("exit status: 3"), "{error}");
    assert!(error.contains("no torch"), "{error}");
}

#[tokio::test]
async fn a_program_that_hangs_is_killed_at_the_deadline() {
    let (_directory, path) = program("#!/bin/sh\nsleep 600 & sleep 600\n");
    let asked = Probe { program: &path, container: None };
    let error = asked.run(path.as_os_str(), &[], Duration::from_millis(100)).await.unwrap_err();
    assert!(matches!(error, VllmVersionError::Timeout { .. }));
}

#[tokio::test]
async fn a_program_in_a_container_is_asked_there() {
    let (_inside, vllm) = script("");
    // It runs what comes after the image.
    let (directory, runtime) =
        program("#!/bin/sh\necho INFO: no squashfs >&2\nwhile [ \"$1\" != / ]; do shift; done\nshift\nexec \"$@\"\n");
    let config = AgentConfig { image: "/".into(), container: runtime.clone(), ..AgentConfig::default() };
    let container = Container::of(&config).unwrap();
    let found = probe(&vllm, container.as_ref()).await.unwrap();
    assert_eq!(found.rust_front_end.as_deref(), Some(Path::new("/lib/vllm-rs")));
    let refusing = "#!/bin/sh\necho 'FATAL:   \"vllm\": executable file not found in $PATH' >&2\nexit 255\n";
    std::fs::write(&runtime, refusing).unwrap();
    let error = probe(Path::new("vllm"), container.as_ref()).await.unwrap_err();
    assert!(matches!(&error, VllmVersionError::NoContainer { remedy, .. } if remedy.contains("--vllm-bin")), "{error}");
    drop(directory);
    let error = probe(Path::new("vllm"), container.as_ref()).await.unwrap_err();
    assert!(matches!(&error, VllmVersionError::Start { program, .. } if *program == runtime), "{error}");
}
