//! Folder of a fleet's state, on a file system that login and compute nodes share.
//!
//! Whoever changes the desired entries writes `fleet.toml`; the controller owns everything else.
//! Files are replaced whole, so readers without a lock see one state or the other.

mod endpoint;
mod heartbeat;
mod housekeeping;
mod known_scheduler;
mod lock;
mod standby;
mod tag;

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use hostler_cluster::{FleetEntry, Memory};
use hostler_scheduler::SchedulerIdentity;
use hostler_tls::{TlsError, write_private};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use self::lock::LOCK_TIMEOUT;
use self::tag::{find_tag, take_tag};
use crate::ClusterConfig;
use crate::job_settings::JobSettings;
use crate::status::FleetStatus;

pub use self::endpoint::{Endpoint, ProgramFile};
pub(crate) use self::heartbeat::HEARTBEAT_INTERVAL;
pub use self::heartbeat::HEARTBEAT_LIFETIME;
pub(crate) use self::housekeeping::IDENTITY_KEPT_FOR;

const ENDPOINT_FILE: &str = "endpoint.json";

/// Reason why the folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("there is no home folder to keep the fleet's state in: set cluster.state_dir")]
    NoHome,
    #[error("others may read or change {} (owner {owner}, mode {mode:o}): `chmod 700` it, or choose another folder with cluster.state_dir", path.display())]
    Open { path: PathBuf, owner: u32, mode: u32 },
    #[error("cannot {what} {}: {source}", path.display())]
    File { what: &'static str, path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Write(#[from] TlsError),
    #[error("{} is not what Hostler wrote: {message}", path.display())]
    Unreadable { path: PathBuf, message: String },
    #[error("another command changes {}: try again", path.display())]
    Busy { path: PathBuf },
    #[error(
        "the fleet in {} has its jobs at another scheduler ({known}) than this host's ({found}): give the fleet of each cluster a folder of its own with cluster.state_dir; if it is the same scheduler by another name, remove scheduler.json there", path.display()
    )]
    OtherScheduler { path: PathBuf, known: SchedulerIdentity, found: SchedulerIdentity },
}

/// Written form of the desired entries.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FleetFile {
    /// How jobs are submitted, as set by whoever last changed what is wanted; `None` in a file
    /// written by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) jobs: Option<JobSettings>,
    #[serde(default, rename = "model")]
    pub(crate) entries: Vec<FleetEntry>,
}

/// A fleet's folder, which only its user can access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FleetFolder {
    path: PathBuf,
    /// Tag in the names of the fleet's jobs; `None` until the folder has been made.
    tag: Option<String>,
}

impl FleetFolder {
    /// The configured folder as it is, to show what would be done. Nothing is made or checked.
    ///
    /// # Errors
    /// When there is no home folder, or the tag cannot be read.
    pub fn peek(config: &ClusterConfig) -> Result<Self, FolderError> {
        let path = absolute(&place(config)?)?;
        Ok(Self { tag: find_tag(&path)?, path })
    }

    /// Opens the configured folder, and makes it if missing.
    ///
    /// # Errors
    /// When it cannot be made, or others can change it.
    pub fn open(config: &ClusterConfig) -> Result<Self, FolderError> {
        Self::at(&place(config)?)
    }

    /// Opens the configured folder if it exists.
    ///
    /// # Errors
    /// As for `open`.
    pub fn find(config: &ClusterConfig) -> Result<Option<Self>, FolderError> {
        let path = match place(config) {
            // A user without a home has kept no fleet there.
            Err(FolderError::NoHome) => return Ok(None),
            path => path?,
        };
        if path.is_dir() { Self::at(&path).map(Some) } else { Ok(None) }
    }

    /// Opens the folder at a path.
    ///
    /// # Errors
    /// As for `open`.
    pub fn at(path: &Path) -> Result<Self, FolderError> {
        let failed = |what, source| FolderError::File { what, path: path.to_owned(), source };
        let path = absolute(path)?;
        for folder in [path.clone(), path.join("jobs"), path.join("memory")] {
            make(&folder)?;
        }
        let found = fs::metadata(&path).map_err(|source| failed("look at", source))?;
        if found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
            return Err(FolderError::Open { path, owner: found.uid(), mode: found.mode() & 0o7777 });
        }
        Ok(Self { tag: Some(take_tag(&path)?), path })
    }

    /// Whether the fleet's tag, which `job_name` needs, is known.
    #[must_use]
    pub fn has_tag(&self) -> bool {
        self.tag.is_some()
    }

    /// Name of an entry's jobs, by which the scheduler lists them. No job of another name is this
    /// fleet's. Without a tag, `TAG` stands for it.
    #[must_use]
    pub fn job_name(&self, entry: &str) -> String {
        format!("hostler-{entry}-{}", self.tag.as_deref().unwrap_or("TAG"))
    }

    /// Name of the controller's own job. No entry's jobs have it, because those begin with
    /// `hostler-`.
    #[must_use]
    pub fn controller_job_name(&self) -> String {
        format!("hostler_controller-{}", self.tag.as_deref().unwrap_or("TAG"))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder where the scheduler writes the jobs' output.
    #[must_use]
    pub fn job_logs(&self) -> PathBuf {
        self.path.join("jobs")
    }

    /// Folder of the scripts of an entry's jobs.
    #[must_use]
    pub fn scripts(&self, entry: &str) -> PathBuf {
        self.path.join("scripts").join(entry)
    }

    /// Folder of the scripts of the controller's own job.
    #[must_use]
    pub fn controller_scripts(&self) -> PathBuf {
        self.path.join("controller")
    }

    /// Writes one of these scripts. An identical file stays untouched, because a job may be reading
    /// it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_script(&self, path: &Path, script: &str) -> Result<(), FolderError> {
        if read(path)?.is_some_and(|found| found == script) {
            return Ok(());
        }
        if let Some(folder) = path.parent() {
            make(folder)?;
        }
        Ok(write_private(path, script.as_bytes())?)
    }

    /// Log of the controller.
    #[must_use]
    pub fn controller_log(&self) -> PathBuf {
        self.path.join("controller.log")
    }

    /// Files and batches of the router's Batch API.
    #[must_use]
    pub fn batches(&self) -> PathBuf {
        self.path.join("batches")
    }

    /// Key of operators on other hosts, valid while this controller runs.
    #[must_use]
    pub fn operator_key(&self) -> PathBuf {
        self.path.join("operator.key")
    }

    /// Token by which the fleet's jobs join.
    #[must_use]
    pub fn join_token(&self) -> PathBuf {
        self.path.join("join-token")
    }

    /// Folder where the fleet's agents keep their keys and certificates, with a subfolder for each
    /// node name.
    #[must_use]
    pub fn identities(&self) -> PathBuf {
        self.path.join("identity")
    }

    /// File that says how to reach the fleet. The agents of its jobs read it, too.
    #[must_use]
    pub fn endpoint_file(&self) -> PathBuf {
        self.path.join(ENDPOINT_FILE)
    }

    /// Wanted entries.
    ///
    /// # Errors
    /// When the file cannot be read, or an entry is wrong.
    pub fn entries(&self) -> Result<Vec<FleetEntry>, FolderError> {
        Ok(self.fleet_file()?.entries)
    }

    /// Wanted entries, and how their jobs are submitted.
    pub(crate) fn fleet_file(&self) -> Result<FleetFile, FolderError> {
        let path = self.path.join("fleet.toml");
        let Some(text) = read(&path)? else { return Ok(FleetFile::default()) };
        toml::from_str(&text).map_err(|error| FolderError::Unreadable { path, message: error.to_string() })
    }

    /// Changes the desired entries, excluding other commands meanwhile.
    ///
    /// # Errors
    /// When the file cannot be read or written, or another command has it for too long.
    pub fn change_entries<T>(&self, change: impl FnOnce(&mut Vec<FleetEntry>) -> T) -> Result<T, FolderError> {
        self.change_file(|file| change(&mut file.entries))
    }

    /// Changes the desired entries, and how jobs are submitted from now on. Also returns whether
    /// jobs were submitted differently before.
    ///
    /// # Errors
    /// As for `change_entries`.
    pub fn change_wanted<T>(&self, jobs: JobSettings, change: impl FnOnce(&mut Vec<FleetEntry>) -> T) -> Result<(T, bool), FolderError> {
        self.change_file(|file| {
            let has_changed = file.jobs.as_ref().is_some_and(|before| before.changes_jobs_of(&file.entries, &jobs));
            file.jobs = Some(jobs);
            (change(&mut file.entries), has_changed)
        })
    }

    fn change_file<T>(&self, change: impl FnOnce(&mut FleetFile) -> T) -> Result<T, FolderError> {
        let _lock = self.lock("fleet.lock", LOCK_TIMEOUT)?;
        let mut file = self.fleet_file()?;
        let result = change(&mut file);
        let path = self.path.join("fleet.toml");
        let text =
            toml::to_string_pretty(&file).map_err(|error| FolderError::Unreadable { path: path.clone(), message: error.to_string() })?;
        write_private(&path, text.as_bytes())?;
        Ok(result)
    }

    /// Removes the endpoint and the files of a controller's job if nothing is wanted, excluding
    /// other commands meanwhile. Returns `false` if something is wanted.
    ///
    /// # Errors
    /// As for `change_entries`.
    pub fn close_if_empty(&self) -> Result<bool, FolderError> {
        let _lock = self.lock("fleet.lock", LOCK_TIMEOUT)?;
        let is_empty = self.entries()?.is_empty();
        if is_empty {
            self.remove_endpoint()?;
            // The certificates for clients stay: shells refer to them until they end, and could
            // reach nobody by TLS without them.
            remove(&self.operator_key())?;
            remove_folder(&self.controller_scripts())?;
        }
        Ok(is_empty)
    }

    /// Where the fleet is reached; `None` if no controller runs.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn endpoint(&self) -> Result<Option<Endpoint>, FolderError> {
        self.read_json(ENDPOINT_FILE)
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn write_endpoint(&self, endpoint: &Endpoint) -> Result<(), FolderError> {
        self.write_json(ENDPOINT_FILE, endpoint)
    }

    /// # Errors
    /// When the file cannot be removed.
    pub fn remove_endpoint(&self) -> Result<(), FolderError> {
        remove(&self.endpoint_file())
    }

    /// The controller's last status; `None` before its first step.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn status(&self) -> Result<Option<FleetStatus>, FolderError> {
        self.read_json("status.json")
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn write_status(&self, status: &FleetStatus) -> Result<(), FolderError> {
        self.write_json("status.json", status)
    }

    /// The controller's memory of an entry; `None` if there is none.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn memory(&self, entry: &str) -> Result<Option<Memory>, FolderError> {
        self.read_json(&format!("memory/{entry}.json"))
    }

    /// # Errors
    /// When the file cannot be written.
    pub fn write_memory(&self, entry: &str, memory: &Memory) -> Result<(), FolderError> {
        self.write_json(&format!("memory/{entry}.json"), memory)
    }

    /// Names of the entries that have a memory.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn remembered(&self) -> Result<Vec<String>, FolderError> {
        let path = self.path.join("memory");
        let failed = |source| FolderError::File { what: "read", path: path.clone(), source };
        let files = fs::read_dir(&path).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let mut names: Vec<String> =
            files.iter().filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".json")?.to_owned())).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Removes the memory and the scripts of an entry that has no jobs.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub fn forget(&self, entry: &str) -> Result<(), FolderError> {
        remove_folder(&self.scripts(entry))?;
        remove(&self.path.join(format!("memory/{entry}.json")))
    }

    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, FolderError> {
        let path = self.path.join(name);
        let Some(text) = read(&path)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| FolderError::Unreadable { path, message: error.to_string() })
    }

    fn write_json<T: Serialize>(&self, name: &str, value: &T) -> Result<(), FolderError> {
        let path = self.path.join(name);
        let text =
            serde_json::to_vec_pretty(value).map_err(|error| FolderError::Unreadable { path: path.clone(), message: error.to_string() })?;
        Ok(write_private(&path, &text)?)
    }
}

fn place(config: &ClusterConfig) -> Result<PathBuf, FolderError> {
    if !config.state_dir.as_os_str().is_empty() {
        return Ok(config.state_dir.clone());
    }
    Ok(hostler_boot::home::state_dir().ok_or(FolderError::NoHome)?.join("hostler/fleet"))
}

fn absolute(path: &Path) -> Result<PathBuf, FolderError> {
    std::path::absolute(path).map_err(|source| FolderError::File { what: "find", path: path.to_owned(), source })
}

/// Makes a folder and its parents for this user alone.
fn make(path: &Path) -> Result<(), FolderError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| FolderError::File { what: "make", path: path.to_owned(), source })
}

fn remove(path: &Path) -> Result<(), FolderError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(FolderError::File { what: "remove", path: path.to_owned(), source }),
        _ => Ok(()),
    }
}

fn remove_folder(path: &Path) -> Result<(), FolderError> {
    match fs::remove_dir_all(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(FolderError::File { what: "remove", path: path.to_owned(), source }),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<Option<String>, FolderError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(FolderError::File { what: "read", path: path.to_owned(), source }),
    }
}

#[cfg(test)]
pub(crate) mod tests;
