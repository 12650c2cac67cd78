//! Default locations of a user's files, by the XDG base directory specification. `None` if there is
//! no home.

use std::path::PathBuf;

use rustix::process::geteuid;

use crate::socket::is_private_folder;

/// `$XDG_CONFIG_HOME`, else `~/.config`.
#[must_use]
pub fn config_dir() -> Option<PathBuf> {
    xdg_dir("XDG_CONFIG_HOME", ".config")
}

/// `$XDG_STATE_HOME`, else `~/.local/state`.
#[must_use]
pub fn state_dir() -> Option<PathBuf> {
    xdg_dir("XDG_STATE_HOME", ".local/state")
}

/// `$XDG_CACHE_HOME`, else `~/.cache`.
#[must_use]
pub fn cache_dir() -> Option<PathBuf> {
    xdg_dir("XDG_CACHE_HOME", ".cache")
}

fn xdg_dir(variable: &str, below_home: &str) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(variable).or_else(|| Some(set("HOME")?.join(below_home)))
}

/// Folder for this user's sockets that must outlive the login: the login's own folder is removed at
/// logout.
#[must_use]
pub fn fallback_run_dir() -> PathBuf {
    PathBuf::from(format!("/tmp/hostler-{}", geteuid().as_raw()))
}

/// Folders in which this user's routers put their sockets, preferred first.
///
/// They are `$XDG_RUNTIME_DIR/hostler`, the same folder if a batch job lacks the variable, and
/// `/tmp/hostler-UID`. A program that looks for a router searches all of them.
#[must_use]
pub fn run_dirs() -> Vec<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let of_login = PathBuf::from(format!("/run/user/{}", geteuid().as_raw()));
    let logins = named.into_iter().chain([of_login]).filter(|path| path.is_absolute() && is_private_folder(path));
    let mut folders: Vec<PathBuf> = logins.map(|base| base.join("hostler")).collect();
    folders.dedup();
    folders.push(fallback_run_dir());
    folders
}
