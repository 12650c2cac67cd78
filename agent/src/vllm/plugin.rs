//! What the agent adds to vLLM from within: a plugin, in vLLM's own sense, that has the threads of the engine's core take turns more often.
//!
//! The core packs and sends its events about the cache in a thread of its own. A thread that wants Python's lock waits for 5 ms before it asks the one that
//! has it to let go (`sys.setswitchinterval`), and the core's loop seldom lets go by itself: with 512 streams on an H200 the events came 5.8 ms late, and the
//! loop's own steps were held up as often. At 0.5 ms they came 1.3 ms late, and the engine gave 1.08 times the tokens; docs/gpus.md has the measurements.
//!
//! vLLM loads every plugin that Python's metadata names, so the folder is all that it takes: on `PYTHONPATH` before what is inherited there. A
//! `VLLM_PLUGINS` of the user's own, which lists the plugins that may be loaded, decides about this one too.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The variable that gives the plugin the switch interval, in seconds.
pub(crate) const SWITCH_INTERVAL_VARIABLE: &str = "HOSTLER_SWITCH_INTERVAL";

/// A tenth of Python's own; 1 ms gave about the same (docs/gpus.md).
const SWITCH_INTERVAL_SECONDS: &str = "0.0005";

/// The plugin's name, as the metadata have it.
const NAME: &str = "hostler";

/// The folder's files: the module, and what Python's metadata has to say of it.
const FILES: [(&str, &str); 3] = [
    ("hostler_engine.py", include_str!("plugin/hostler_engine.py")),
    ("hostler_engine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: hostler-engine\nVersion: 1\n"),
    ("hostler_engine-1.dist-info/entry_points.txt", "[vllm.general_plugins]\nhostler = hostler_engine:register\n"),
];

/// The folder of an engine with this directory.
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

/// The variables that have an engine load it, for this inherited `PYTHONPATH`; `None` where the directory's name cannot be on such a path.
pub(super) fn environment(directory: &Path, inherited: &OsStr) -> Option<[(&'static str, OsString); 2]> {
    // An empty `PYTHONPATH` adds no entry: an empty entry would mean the working directory.
    let inherited = std::env::split_paths(inherited).filter(|_| !inherited.is_empty());
    let path = std::env::join_paths(std::iter::once(folder_path(directory)).chain(inherited)).ok()?;
    Some([("PYTHONPATH", path), (SWITCH_INTERVAL_VARIABLE, SWITCH_INTERVAL_SECONDS.into())])
}

/// Whether this list of the plugins that may be loaded (`VLLM_PLUGINS`) leaves it out.
pub(crate) fn is_excluded_by(allowed: &OsStr) -> bool {
    !allowed.as_encoded_bytes().split(|&byte| byte == b',').any(|name| name == NAME.as_bytes())
}

#[cfg(test)]
mod tests;
