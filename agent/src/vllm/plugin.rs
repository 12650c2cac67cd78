//! A vLLM plugin that makes the threads of the engine's core take turns more often.
//!
//! The core packs and sends its cache events in a separate thread. A thread that wants Python's
//! lock waits for 5 ms before it asks the holder to let go (`sys.setswitchinterval`), and the
//! core's loop seldom lets go by itself. With 512 streams on an H200 the events came 5.8 ms late,
//! and the loop's own steps were held up as often. At 0.5 ms they came 1.3 ms late, and the engine
//! gave 1.08 times the tokens; docs/gpus.md has the measurements.
//!
//! vLLM loads every plugin that Python's metadata names, so the folder is enough. It comes first on
//! `PYTHONPATH`, before the inherited entries. If the user sets `VLLM_PLUGINS`, which lists the
//! plugins that may be loaded, it decides about this one, too.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Variable that gives the plugin the switch interval, in seconds.
pub(crate) const SWITCH_INTERVAL_VARIABLE: &str = "HOSTLER_SWITCH_INTERVAL";

/// Switch interval: a tenth of Python's own; 1 ms gave about the same (docs/gpus.md).
const SWITCH_INTERVAL_SECONDS: &str = "0.0005";

/// Name of the plugin in the metadata.
const NAME: &str = "hostler";

/// Files of the folder: the module, and its Python metadata.
const FILES: [(&str, &str); 3] = [
    ("hostler_engine.py", include_str!("plugin/hostler_engine.py")),
    ("hostler_engine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: hostler-engine\nVersion: 1\n"),
    ("hostler_engine-1.dist-info/entry_points.txt", "[vllm.general_plugins]\nhostler = hostler_engine:register\n"),
];

/// Plugin folder of an engine with this directory.
fn folder_path(directory: &Path) -> PathBuf {
    directory.join("python")
}

pub(super) fn write(directory: &Path) -> io::Result<()> {
    for (name, text) in FILES {
        let path = folder_path(directory).join(name);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// Variables that make an engine load the plugin, for this inherited `PYTHONPATH`.
///
/// `None` if the directory's name cannot be on such a path.
pub(super) fn environment(directory: &Path, inherited: &OsStr) -> Option<[(&'static str, OsString); 2]> {
    // An empty `PYTHONPATH` adds no entry, because an empty entry would mean the working directory.
    let inherited = std::env::split_paths(inherited).filter(|_| !inherited.is_empty());
    let path = std::env::join_paths(std::iter::once(folder_path(directory)).chain(inherited)).ok()?;
    Some([("PYTHONPATH", path), (SWITCH_INTERVAL_VARIABLE, SWITCH_INTERVAL_SECONDS.into())])
}

/// Whether this list of the plugins that may be loaded (`VLLM_PLUGINS`) leaves out the agent's
/// plugin.
pub(crate) fn is_excluded_by(allowed: &OsStr) -> bool {
    !allowed.as_encoded_bytes().split(|&byte| byte == b',').any(|name| name == NAME.as_bytes())
}

#[cfg(test)]
mod tests;
