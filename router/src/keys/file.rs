//! The key file: its contents, and how it is read and replaced. It is TOML with one `[[key]]` per
//! key, mode 0600, written by `hostler keys` and read by the router.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::secret::{Digest, Secret, is_id};
use super::{KeyLimits, Role};

/// The beginning of a key file.
const FILE_HEADER: &str =
    "# Keys of Hostler, written by `hostler keys`: only their SHA-256, never the keys themselves. Comments are not kept.\n";

/// Largest key file that is read, in bytes: about 40,000 keys.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Longest name of a key, a tenant or a model, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// The last second of the year 9999, the last that the notation can express.
const LAST_SECOND: u64 = 253_402_300_799;

/// How long to wait while another program changes the file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A time in whole seconds, as precise as the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(SystemTime);

impl Timestamp {
    /// Cuts off the fraction of a second.
    #[must_use]
    pub fn of(time: SystemTime) -> Self {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        Self(SystemTime::UNIX_EPOCH + Duration::from_secs(since.min(LAST_SECOND)))
    }

    /// `span` after `time`, at most the end of the year 9999.
    #[must_use]
    pub fn after(time: SystemTime, span: Duration) -> Self {
        Self::of(time.checked_add(span).unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(LAST_SECOND)))
    }

    #[must_use]
    pub fn time(self) -> SystemTime {
        self.0
    }
}

impl TryFrom<String> for Timestamp {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let time = humantime::parse_rfc3339(&text).map_err(|error| format!("{text:?} is no time such as 2026-01-31T12:00:00Z: {error}"))?;
        Ok(Self::of(time))
    }
}

impl From<Timestamp> for String {
    fn from(moment: Timestamp) -> Self {
        humantime::format_rfc3339_seconds(moment.0).to_string()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// The key's public name, the middle part of its text.
    pub id: String,
    /// Several keys may share a name, as two do while one replaces the other.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The tenant with which the key shares limits and turns.
    pub tenant: String,
    pub role: Role,
    pub sha256: Digest,
    pub created: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// The time from which the key is not accepted, because somebody revoked it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<Timestamp>,
    /// The models that the key may use; absent means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "KeyLimits::is_empty")]
    pub limits: KeyLimits,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStatus {
    Valid,
    Expired,
    /// Somebody revoked the key, and any grace period is over.
    Revoked,
}

impl KeyEntry {
    /// A new key for sending requests, without limits or expiry.
    #[must_use]
    pub fn new(secret: &Secret, tenant: &str, now: SystemTime) -> Self {
        Self {
            id: secret.id().to_owned(),
            name: String::new(),
            tenant: tenant.to_owned(),
            role: Role::Use,
            sha256: secret.digest(),
            created: Timestamp::of(now),
            expires: None,
            revoked: None,
            models: None,
            limits: KeyLimits::default(),
        }
    }

    #[must_use]
    pub fn status(&self, now: SystemTime) -> KeyStatus {
        let is_past = |moment: Option<Timestamp>| moment.is_some_and(|moment| moment.time() <= now);
        match (is_past(self.revoked), is_past(self.expires)) {
            (true, _) => KeyStatus::Revoked,
            (_, true) => KeyStatus::Expired,
            _ => KeyStatus::Valid,
        }
    }

    /// The key's tenant, or the key itself without one.
    pub(super) fn owner(&self) -> &str {
        if self.tenant.is_empty() { &self.id } else { &self.tenant }
    }

    /// Explains an entry that nobody can have meant.
    fn fault(&self) -> Option<String> {
        let is_name = |text: &str| text.len() <= MAX_NAME_BYTES && !text.chars().any(char::is_control);
        if !is_id(&self.id) {
            return Some("its id is not one that `hostler keys create` makes".into());
        }
        if !is_name(&self.name) || !is_name(&self.tenant) || self.tenant.is_empty() {
            return Some(format!("its name and its tenant must be one line of at most {MAX_NAME_BYTES} bytes, and the tenant not empty"));
        }
        match self.models.as_deref() {
            Some([]) => return Some("its list of models is empty, so it could ask for none: leave `models` out to allow all".into()),
            Some(models) if models.iter().any(|model| model.is_empty() || !is_name(model)) => {
                return Some(format!("a model's name is one line of 1 to {MAX_NAME_BYTES} bytes"));
            }
            _ => {}
        }
        self.limits.fault()
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    #[serde(default)]
    key: Vec<KeyEntry>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error(
        "the key file {0} does not exist: make a first key with `hostler keys create --file {0} --role admin`, or leave router.keys_file empty \
         to ask for no keys"
    )]
    Missing(PathBuf),
    #[error("{path} has mode {mode:04o}, so others than its owner may use it: `chmod 600 {path}`")]
    TooPermissive { path: PathBuf, mode: u32 },
    #[error("cannot {verb} the key file {path}: {source}")]
    Io { verb: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{path}: {message}")]
    Invalid { path: PathBuf, message: String },
    #[error("another program has been changing {0} for 5 s: try again when it has ended")]
    Busy(PathBuf),
    #[error("{0}")]
    ChangeRefused(String),
}

/// Parses a key file.
///
/// # Errors
/// The fault of the file, in one sentence.
pub(super) fn parse(text: &str) -> Result<Vec<KeyEntry>, String> {
    let KeyFile { key: entries } = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
    let mut seen = std::collections::HashSet::new();
    for entry in &entries {
        if let Some(fault) = entry.fault() {
            return Err(format!("the key {:?}: {fault}", entry.id));
        }
        if !seen.insert(&entry.id) {
            return Err(format!("the key {:?} is there twice", entry.id));
        }
    }
    Ok(entries)
}

/// The text of a key file.
///
/// # Errors
/// If one of the keys is invalid.
pub(super) fn to_toml(entries: Vec<KeyEntry>) -> Result<String, String> {
    let text = toml::to_string(&KeyFile { key: entries }).map_err(|error| error.to_string())?;
    // The text must be readable by a router.
    parse(&text)?;
    Ok(format!("{FILE_HEADER}\n{text}"))
}

/// Tells two states of a file apart without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileVersion {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// The present state of the file; `None` if it does not exist or may not be inspected.
    pub(super) fn now(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().as_ref().map(Self::of)
    }
}

/// Reads the whole file, and its version from before the read.
pub(super) fn read(path: &Path) -> Result<(Vec<KeyEntry>, FileVersion), KeyFileError> {
    let mut file = options().read(true).open(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => KeyFileError::Missing(path.to_owned()),
        _ => KeyFileError::Io { verb: "read", path: path.to_owned(), source },
    })?;
    read_open(&mut file, path)
}

/// Opens without waiting for the other end of a pipe, or for a device. What was opened is checked
/// before it is read.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

fn read_open(file: &mut File, path: &Path) -> Result<(Vec<KeyEntry>, FileVersion), KeyFileError> {
    let (text, stamp) = read_private_file(file, path)?;
    let entries = parse(&text).map_err(|message| KeyFileError::Invalid { path: path.to_owned(), message })?;
    Ok((entries, stamp))
}

/// Reads a file that nobody but its owner may read or change.
///
/// # Errors
/// If there is none, or others may read or change it.
pub fn read_private(path: &Path) -> Result<String, KeyFileError> {
    let mut file = options().read(true).open(path).map_err(|source| KeyFileError::Io { verb: "read", path: path.to_owned(), source })?;
    read_private_file(&mut file, path).map(|(text, _)| text)
}

fn read_private_file(file: &mut File, path: &Path) -> Result<(String, FileVersion), KeyFileError> {
    let io = |source| KeyFileError::Io { verb: "read", path: path.to_owned(), source };
    let metadata = file.metadata().map_err(io)?;
    let wrong = |message: String| Err(KeyFileError::Invalid { path: path.to_owned(), message });
    if !metadata.is_file() {
        return wrong("this is not a regular file".into());
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyFileError::TooPermissive { path: path.to_owned(), mode });
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return wrong(format!("it has more than {MAX_FILE_BYTES} bytes"));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok((text, FileVersion::of(&metadata))),
        Err(_) => wrong("it is no text".into()),
    }
}

/// Reads the keys of the file at `path`.
///
/// # Errors
/// If the file cannot be read, others may read it, or it is no key file.
pub fn list(path: &Path) -> Result<Vec<KeyEntry>, KeyFileError> {
    read(path).map(|(entries, _)| entries)
}

/// Replaces the file atomically by one with the keys that `change` leaves. Other programs that
/// change it wait meanwhile. With `create`, a missing file is created.
///
/// # Errors
/// If the file cannot be used, or `change` refuses.
pub fn change<T>(path: &Path, create: bool, change: impl FnOnce(&mut Vec<KeyEntry>) -> Result<T, String>) -> Result<T, KeyFileError> {
    let mut locked = lock(path, create)?;
    let (mut entries, _) = read_open(&mut locked, path)?;
    let changed = change(&mut entries).map_err(KeyFileError::ChangeRefused)?;
    let text = to_toml(entries).map_err(KeyFileError::ChangeRefused)?;
    replace(path, &text).map_err(|source| KeyFileError::Io { verb: "write", path: path.to_owned(), source })?;
    Ok(changed)
}

/// Opens and locks the file. If the previous holder of the lock has replaced the file, the new file
/// is locked.
#[allow(clippy::disallowed_methods, reason = "only the command line changes the file, and it has nothing else to do")]
fn lock(path: &Path, create: bool) -> Result<File, KeyFileError> {
    let io = |verb| move |source| KeyFileError::Io { verb, path: path.to_owned(), source };
    let deadline = Instant::now() + LOCK_TIMEOUT;
    if create && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(io("make the folder of"))?;
    }
    loop {
        let file = options().read(true).write(true).create(create).mode(0o600).open(path);
        let file = file.map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => KeyFileError::Missing(path.to_owned()),
            _ => io("change")(source),
        })?;
        match file.try_lock() {
            Ok(()) => {
                let ours = file.metadata().map_err(io("read"))?;
                if std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                    return Ok(file);
                }
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_INTERVAL),
            Err(TryLockError::Error(source)) => return Err(io("lock")(source)),
        }
        if Instant::now() >= deadline {
            return Err(KeyFileError::Busy(path.to_owned()));
        }
    }
}

/// Replaces the file at `path` by one with this text; readers see either whole. A link is followed.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let path = std::fs::canonicalize(path)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = folder.join(format!(".{name}.{}.new", std::process::id()));
    // A program with this process's number that died while it held the lock may have left this
    // file.
    let _ = std::fs::remove_file(&new);
    let before = std::fs::metadata(&path)?;
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        let ours = file.metadata()?;
        if (before.uid(), before.gid()) != (ours.uid(), ours.gid()) {
            // Root changes the file of another user, whose router must still be able to read it.
            fchown(&file, Some(before.uid()), Some(before.gid()))?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        // Sync the folder, so that the new name also survives a power failure.
        File::open(folder)?.sync_all()
    })();
    written.inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })
}

#[cfg(test)]
mod tests;
