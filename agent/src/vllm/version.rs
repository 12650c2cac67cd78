//! Installed vLLM: its version, whether it has the Rust front-end, and whether it can send traces.
//!
//! It is read once before the first engine starts, because an unknown flag costs an engine thirteen
//! seconds and its life.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use hostler_boot::program::run_to_end;
use tokio::process::Command;

use super::parsers::{InstalledParsers, LISTING_SCRIPT};

/// Time limit for `vllm --version`, which imports all of vLLM: 17 s on two slow cores, more on a
/// cold parallel filesystem.
const FULL_PROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// Time limit for reading the installed package's version, which imports nothing of vLLM: 0.1 s on
/// the same machine.
const QUICK_PROBE_TIMEOUT: Duration = Duration::from_secs(15);

/// A vLLM release.
///
/// Suffixes such as `rc1` or `+cpu` are left out, because flags do not depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct VllmVersion {
    /// Major version, always 0 so far.
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl VllmVersion {
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor, patch: 0 }
    }

    /// Finds the version in the output of `vllm --version`: the last line that is a version, since
    /// warnings come before it.
    pub fn parse(output: &str) -> Option<Self> {
        output.lines().rev().find_map(|line| Self::parse_word(line.trim()))
    }

    fn parse_word(word: &str) -> Option<Self> {
        let word = word.strip_prefix("vllm ").unwrap_or(word);
        if word.contains(char::is_whitespace) {
            return None;
        }
        let mut parts = word.splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parse_digits(parts.next()?)?;
        let patch = parts.next().and_then(parse_digits).unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

impl fmt::Display for VllmVersion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

fn parse_digits(text: &str) -> Option<u32> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[derive(Debug, thiserror::Error)]
pub enum VllmVersionError {
    #[error("cannot start {}: {source}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("`{} --version` did not finish within {} s", program.display(), deadline.as_secs())]
    Timeout { program: PathBuf, deadline: Duration },
    #[error("`{} --version` printed no version; it ended with {status} and its last line was: {last_line}", program.display())]
    Unreadable { program: PathBuf, status: String, last_line: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledVllm {
    pub version: VllmVersion,
    /// Python that runs the program, if the program is vLLM's own script and nobody's wrapper.
    pub interpreter: Option<PathBuf>,
    /// Its modules are not compiled, and their folder may not be written: each import takes three
    /// times as long.
    pub lacks_bytecode: bool,
    /// Rust front-end shipped with this vLLM.
    pub rust_front_end: Option<PathBuf>,
    /// Whether its Python has the packages without which it sends no traces.
    pub has_opentelemetry: bool,
    pub(crate) parsers: InstalledParsers,
}

/// Scripts that print the package's folder and whether it can send traces, and, at last, its
/// version.
///
/// They import nothing of vLLM: a package's place is found without running it.
const PACKAGE_SCRIPT: &str = "\
import importlib.metadata as m, importlib.util as u, os, sys
folders = list(getattr(u.find_spec('vllm'), 'submodule_search_locations', None) or [])
for folder in folders:
    print('folder ' + folder)
    compiled = os.path.exists(u.cache_from_source(folder + '/__init__.py'))
    if not compiled and (sys.dont_write_bytecode or not os.access(folder, os.W_OK)):
        print('no bytecode')
try:
    for name in ('sdk', 'exporter-otlp-proto-grpc', 'exporter-otlp-proto-http'):
        m.version('opentelemetry-' + name)
    print('opentelemetry')
except m.PackageNotFoundError:
    pass";

const VERSION_SCRIPT: &str = "print(m.version('vllm'))";

/// Asks the vLLM behind `program`, first through the Python that its first line names, else by
/// `program --version`, which says nothing of a front-end.
///
/// Takes up to 135 s.
pub async fn probe(program: &Path) -> Result<InstalledVllm, VllmVersionError> {
    if let Some(interpreter) = read_interpreter(program) {
        let script = [PACKAGE_SCRIPT, LISTING_SCRIPT, VERSION_SCRIPT].concat();
        let quick = run_program(&interpreter, &[OsStr::new("-c"), OsStr::new(&script)], QUICK_PROBE_TIMEOUT).await;
        if let Some((output, version)) = quick.ok().and_then(|(_, output)| VllmVersion::parse(&output).map(|version| (output, version))) {
            let has_opentelemetry = output.lines().any(|line| line == "opentelemetry");
            let lacks_bytecode = output.lines().any(|line| line == "no bytecode");
            let parsers = InstalledParsers::from_output(&output);
            let rust_front_end = find_rust_front_end(&output);
            let interpreter = is_own_script(program).then_some(interpreter);
            return Ok(InstalledVllm { version, interpreter, lacks_bytecode, rust_front_end, has_opentelemetry, parsers });
        }
    }
    let (status, output) = run_program(program, &[OsStr::new("--version")], FULL_PROBE_TIMEOUT).await?;
    let unreadable =
        || VllmVersionError::Unreadable { program: program.to_owned(), status: status.clone(), last_line: last_line(&output).to_owned() };
    let version = VllmVersion::parse(&output).ok_or_else(unreadable)?;
    Ok(InstalledVllm {
        version,
        interpreter: None,
        lacks_bytecode: false,
        rust_front_end: None,
        has_opentelemetry: false,
        parsers: InstalledParsers::default(),
    })
}

/// Rust front-end in the folders that the script printed, if there is an executable one.
fn find_rust_front_end(output: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let folders = output.lines().filter_map(|line| line.strip_prefix("folder "));
    let mut binaries = folders.map(|folder| Path::new(folder).join("vllm-rs"));
    binaries.find(|path| std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0))
}

pub(crate) fn last_line(output: &str) -> &str {
    let mut lines = output.lines().rev().map(str::trim);
    lines.find(|line| !line.is_empty()).unwrap_or_default()
}

/// Whether the program does nothing but call vLLM, as the script that is installed with it.
fn is_own_script(program: &Path) -> bool {
    const OWN_SCRIPT_BYTES: u64 = 1024;
    let is_small = std::fs::metadata(program).is_ok_and(|meta| meta.len() < OWN_SCRIPT_BYTES);
    is_small && std::fs::read_to_string(program).is_ok_and(|text| text.contains("from vllm.entrypoints.cli.main import main"))
}

/// Python in the first line of an installed console script, if it is named there directly.
fn read_interpreter(program: &Path) -> Option<PathBuf> {
    use std::io::Read;
    let mut head = [0_u8; 512];
    let length = std::fs::File::open(program).ok()?.read(&mut head).ok()?;
    let head = std::str::from_utf8(&head[..length]).ok()?;
    let line = head.strip_prefix("#!")?.lines().next()?.trim();
    let path = Path::new(line);
    let is_python = path.file_name()?.to_str()?.starts_with("python");
    (is_python && path.is_absolute()).then(|| path.to_owned())
}

/// Runs a program, and returns how it ended and its output, standard output last.
async fn run_program(program: &Path, arguments: &[&OsStr], deadline: Duration) -> Result<(String, String), VllmVersionError> {
    let mut command = Command::new(program);
    command.args(arguments);
    match run_to_end(command, b"", deadline).await {
        Ok(Some(Output { status, stdout, stderr })) => {
            let printed = [&stderr[..], b"\n", &stdout].concat();
            Ok((status.to_string(), String::from_utf8_lossy(&printed).into_owned()))
        }
        Ok(None) => Err(VllmVersionError::Timeout { program: program.to_owned(), deadline }),
        Err(source) => Err(VllmVersionError::Start { program: program.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests;
