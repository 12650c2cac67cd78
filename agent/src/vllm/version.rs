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

use super::parsers::{InstalledParsers, LISTING_SCRIPT};
use crate::container::refusal::{self, Refusal};
use crate::container::{self, Container};
use hostler_boot::program::run_to_end;

/// Time limit for `vllm --version`, which imports all of vLLM: 17 s on two slow cores, more on a
/// cold parallel filesystem.
const FULL_PROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// Time limit for reading the installed package's version, which imports nothing of vLLM: 0.1 s on
/// the same machine.
const QUICK_PROBE_TIMEOUT: Duration = Duration::from_secs(15);

/// The same in a container, whose image may be on a cold parallel filesystem. It took 0.1 s with a
/// folder or a file on a local disk.
const CONTAINER_PROBE_TIMEOUT: Duration = Duration::from_secs(60);

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
    #[error("`{}` runs nothing in the image {}: {cause}; {remedy}", runtime.display(), image.display())]
    NoContainer { runtime: PathBuf, image: PathBuf, cause: String, remedy: &'static str },
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

/// Finds the Python in a program's first line, and has it run a script: these are its arguments.
///
/// It says whether the program does nothing but call vLLM, as the script that is installed with it.
/// That has some 200 bytes.
const FIND_SCRIPT: &str = r#"
program=$(command -v "$1") || exit 3
read -r line < "$program"
interpreter=${line#'#!'}
case $line in '#!/'*) ;; *) exit 3 ;; esac
case ${interpreter##*/} in python*) ;; *) exit 3 ;; esac
echo "interpreter $interpreter"
if [ "$(wc -c < "$program")" -lt 1024 ] && grep -qF 'from vllm.entrypoints.cli.main import main' "$program"; then
    echo 'own script'
fi
exec "$interpreter" -c "$2"
"#;

/// Scripts that print what the package has, and, at last, its version.
///
/// They import nothing of vLLM: a package's place is found without running it.
const PACKAGE_SCRIPT: &str = "\
import importlib.metadata as m, importlib.util as u, os, sys
folders = list(getattr(u.find_spec('vllm'), 'submodule_search_locations', None) or [])
for folder in folders:
    compiled = os.path.exists(u.cache_from_source(folder + '/__init__.py'))
    if not compiled and (sys.dont_write_bytecode or not os.access(folder, os.W_OK)):
        print('no bytecode')
    front_end = folder + '/vllm-rs'
    if os.path.isfile(front_end) and os.access(front_end, os.X_OK):
        print('rust front-end ' + front_end)
try:
    for name in ('sdk', 'exporter-otlp-proto-grpc', 'exporter-otlp-proto-http'):
        m.version('opentelemetry-' + name)
    print('opentelemetry')
except m.PackageNotFoundError:
    pass";

const VERSION_SCRIPT: &str = "print(m.version('vllm'))";

/// Asks the vLLM behind `program`, in the container if there is one: first through the Python that
/// its first line names, else by `program --version`, which says nothing of a front-end.
///
/// Takes up to 135 s, and 180 s in a container.
pub async fn probe(program: &Path, container: Option<&Container>) -> Result<InstalledVllm, VllmVersionError> {
    let asked = Probe { program, container };
    let script = [PACKAGE_SCRIPT, LISTING_SCRIPT, VERSION_SCRIPT].concat();
    let arguments = [OsStr::new("-c"), OsStr::new(FIND_SCRIPT), OsStr::new("sh"), program.as_os_str(), OsStr::new(&script)];
    let deadline = if container.is_some() { CONTAINER_PROBE_TIMEOUT } else { QUICK_PROBE_TIMEOUT };
    match asked.run(OsStr::new("sh"), &arguments, deadline).await {
        Ok((_, output)) => {
            if let Some(installed) = InstalledVllm::from_output(&output) {
                return Ok(installed);
            }
            asked.check_container(&output)?;
        }
        Err(error @ VllmVersionError::Start { .. }) if container.is_some() => return Err(error),
        Err(_) => {}
    }
    let (status, output) = asked.run(program.as_os_str(), &[OsStr::new("--version")], FULL_PROBE_TIMEOUT).await?;
    asked.check_container(&output)?;
    let unreadable =
        || VllmVersionError::Unreadable { program: program.to_owned(), status: status.clone(), last_line: last_line(&output).to_owned() };
    Ok(InstalledVllm::of_version(VllmVersion::parse(&output).ok_or_else(unreadable)?))
}

impl InstalledVllm {
    /// A release of which nothing else is known.
    fn of_version(version: VllmVersion) -> Self {
        Self {
            version,
            interpreter: None,
            lacks_bytecode: false,
            rust_front_end: None,
            has_opentelemetry: false,
            parsers: InstalledParsers::default(),
        }
    }

    /// Reads what `FIND_SCRIPT` printed.
    fn from_output(output: &str) -> Option<Self> {
        let version = VllmVersion::parse(output)?;
        let has = |line: &str| output.lines().any(|printed| printed == line);
        let path = |prefix: &str| output.lines().find_map(|line| line.strip_prefix(prefix)).map(PathBuf::from);
        Some(Self {
            version,
            interpreter: path("interpreter ").filter(|_| has("own script")),
            lacks_bytecode: has("no bytecode"),
            rust_front_end: path("rust front-end "),
            has_opentelemetry: has("opentelemetry"),
            parsers: InstalledParsers::from_output(output),
        })
    }
}

pub(crate) fn last_line(output: &str) -> &str {
    let mut lines = output.lines().rev().map(str::trim);
    lines.find(|line| !line.is_empty()).unwrap_or_default()
}

/// The program that is asked, and where it runs.
#[derive(Clone, Copy)]
struct Probe<'a> {
    program: &'a Path,
    container: Option<&'a Container>,
}

impl Probe<'_> {
    /// Runs a program, and returns how it ended and its output, standard output last.
    async fn run(self, program: &OsStr, arguments: &[&OsStr], deadline: Duration) -> Result<(String, String), VllmVersionError> {
        let mut command = container::command(self.container, program);
        command.args(arguments);
        match run_to_end(command, b"", deadline).await {
            Ok(Some(Output { status, stdout, stderr })) => {
                let printed = [&stderr[..], b"\n", &stdout].concat();
                Ok((status.to_string(), String::from_utf8_lossy(&printed).into_owned()))
            }
            Ok(None) => Err(VllmVersionError::Timeout { program: self.program.to_owned(), deadline }),
            Err(source) => {
                let program = self.container.map_or(Path::new(program), Container::runtime).to_owned();
                Err(VllmVersionError::Start { program, source })
            }
        }
    }

    /// Fails if the container's runtime has refused to run anything.
    fn check_container(self, output: &str) -> Result<(), VllmVersionError> {
        let refused = self.container.and_then(|container| Some((container, refusal::find(output.lines())?)));
        match refused {
            None => Ok(()),
            Some((container, Refusal { cause, remedy })) => Err(VllmVersionError::NoContainer {
                runtime: container.runtime().to_owned(),
                image: container.image().to_owned(),
                cause,
                remedy,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
