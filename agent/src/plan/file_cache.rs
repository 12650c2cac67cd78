//! Files as a third tier of the engines' prefix cache: whether, how much, and why not.
//!
//! vLLM writes them from its copies in the host's memory, and loads them back through these. It
//! looks for a file before each load and takes a missing one for a miss, so files may be removed at
//! any time. It never removes one itself. The decision is pure; `file_pool` has the folder.

use std::fmt;
use std::path::{Path, PathBuf};

use super::host_cache::{HostCache, MIN_RESERVE, SHARED_RESERVE};
use super::host_resources::{FileRoom, HostResources};
use super::setup::EnginePlanSetup;
use crate::config::FileCacheSetting;
use crate::file_pool::{RESERVE, pool_folder};
use crate::sizes::format_gib;
use crate::vllm::releases::FILE_CACHE_SINCE;

/// Blocks in one file, and so in one copy in memory. `/dev/shm` gave 4.0 GB/s with files of so many
/// blocks of 16 tokens of an 8B model, 34 MB each (vLLM 0.33).
const FILE_BLOCKS: u32 = 16;

/// Most bytes of a model's name in that of its folder.
const MAX_MODEL_NAME_BYTES: usize = 100;

/// Files with KV blocks of this host's engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileCache {
    Off(NoFileCache),
    On(FilePoolPlan),
}

/// A folder of files that this user's engines on this host share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePoolPlan {
    /// Folder of the files of all releases and models.
    pub folder: PathBuf,
    /// Most bytes of all files.
    pub bytes: u64,
    /// Tokens that they hold.
    pub tokens: u64,
    /// Subfolder for the release, because another one may lay blocks out differently, and in it for
    /// the model, because files are named after tokens alone.
    subfolder: PathBuf,
}

/// Why engines keep no files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoFileCache {
    Unset,
    /// Files are written from the copies in the host's memory, and there are none.
    NoCopies(String),
    OldRelease,
    /// The folder of `agent.file_cache_dir` does not exist.
    Missing(PathBuf),
    /// The folder's path is not UTF-8, as the engine's settings are.
    NotUtf8(PathBuf),
    /// Other hosts share the file system of this folder.
    Shared(PathBuf),
    /// The file system, or the memory that it takes, is too small.
    NoRoom {
        wanted: u64,
        room: u64,
        folder: PathBuf,
    },
}

impl fmt::Display for NoFileCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset => formatter.write_str("agent.file_cache is off"),
            Self::NoCopies(because) => {
                write!(formatter, "files are written from copies in the host's memory (agent.host_cache), and there are none: {because}")
            }
            Self::OldRelease => write!(formatter, "it needs vLLM {FILE_CACHE_SINCE}"),
            Self::Missing(folder) => {
                write!(formatter, "agent.file_cache_dir, {:?}, is no folder of this host", folder.display().to_string())
            }
            Self::NotUtf8(folder) => write!(formatter, "the path {} (agent.file_cache_dir) is not UTF-8", folder.display()),
            Self::Shared(folder) => write!(
                formatter,
                "{} (agent.file_cache_dir) is on a file system that other hosts share; name a folder on a disk of this host, or /dev/shm",
                folder.display()
            ),
            Self::NoRoom { wanted, room, folder } => write!(
                formatter,
                "{} (agent.file_cache_dir) has room for {} and not for {}, besides the copies in memory if it is memory itself",
                folder.display(),
                format_gib(*room),
                format_gib(*wanted)
            ),
        }
    }
}

/// Decides about files of the engines, whose copies in the host's memory are decided.
pub(super) fn choose(
    setting: FileCacheSetting,
    directory: &Path,
    setup: &EnginePlanSetup,
    (copies, engines): (&HostCache, u64),
    resources: HostResources,
) -> FileCache {
    let FileCacheSetting::Bytes(bytes) = setting else { return FileCache::Off(NoFileCache::Unset) };
    let share = match copies {
        HostCache::On(share) => share,
        HostCache::Off(because) => return FileCache::Off(NoFileCache::NoCopies(because.to_string())),
    };
    let Some(version) = setup.version.filter(|_| setup.is_at_least(FILE_CACHE_SINCE)) else {
        return FileCache::Off(NoFileCache::OldRelease);
    };
    let room = match resources.file_room {
        FileRoom::Missing => return FileCache::Off(NoFileCache::Missing(directory.to_owned())),
        FileRoom::Shared => return FileCache::Off(NoFileCache::Shared(directory.to_owned())),
        FileRoom::Disk(bytes) => bytes.saturating_sub(RESERVE),
        FileRoom::Memory(bytes) => {
            let copies = share.bytes.saturating_mul(engines);
            let in_memory = resources.memory.bytes.saturating_sub(MIN_RESERVE).saturating_sub(copies);
            bytes.saturating_sub(SHARED_RESERVE).saturating_sub(copies).min(in_memory)
        }
    };
    let folder = pool_folder(directory);
    if folder.to_str().is_none() {
        return FileCache::Off(NoFileCache::NotUtf8(folder));
    }
    if bytes > room {
        return FileCache::Off(NoFileCache::NoRoom { wanted: bytes, room, folder: directory.to_owned() });
    }
    let subfolder = Path::new(&version.to_string()).join(model_folder(&setup.model));
    FileCache::On(FilePoolPlan { folder, bytes, tokens: bytes / share.token_bytes(), subfolder })
}

/// Name of a model's folder. vLLM makes one in it whose name has the whole model's too, so this one
/// may be cut.
fn model_folder(model: &str) -> String {
    let name = model.replace(['/', '\\'], "_");
    let cut = name.len().saturating_sub(MAX_MODEL_NAME_BYTES);
    name[name.ceil_char_boundary(cut)..].to_owned()
}

impl FilePoolPlan {
    /// Where the engines write.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.join(&self.subfolder)
    }

    /// The tier in the connector's settings.
    pub(super) fn tier_config(&self) -> String {
        let root = serde_json::Value::String(self.root().display().to_string());
        // The value of a flag is divided at blanks.
        let root = root.to_string().replace(' ', "\\u0020");
        format!(
            r#","spec_name":"TieringOffloadingSpec","blocks_per_chunk":{FILE_BLOCKS},"secondary_tiers":[{{"type":"fs","root_dir":{root},"enable_kv_events":true}}]"#
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AgentConfig, HostCacheSetting, Profile};
    use crate::plan::Plan;
    use crate::plan::host_memory::{HostMemory, MemoryLimit};
    use crate::plan::tests::{Case, config, planned_in};
    use crate::sizes::GIB;

    fn planned(minor: u32, host_cache: &str, file_room: FileRoom) -> Plan {
        let host_cache = HostCacheSetting::try_from(host_cache.to_owned()).unwrap();
        let file_cache = FileCacheSetting::Bytes(200 * GIB);
        let config = AgentConfig { host_cache, file_cache, file_cache_dir: "/fast".into(), ..config(Profile::Throughput, "") };
        let host = HostResources {
            shared_bytes: 512 * GIB,
            memory: HostMemory { bytes: 1024 * GIB, limit: MemoryLimit::Host },
            file_room,
            ..HostResources::unlimited()
        };
        planned_in(&Case { model: "llama-3.1-8b", gpus: "2x80", nvlink: 0, minor, config }, host).unwrap()
    }

    fn reason(minor: u32, host_cache: &str, room: FileRoom) -> String {
        match planned(minor, host_cache, room).file_cache {
            FileCache::Off(because) => because.to_string(),
            FileCache::On(pool) => panic!("{pool:?}"),
        }
    }

    #[test]
    fn the_engines_of_a_host_share_one_folder_of_files() {
        let plan = planned(33, "256GiB", FileRoom::Disk(1024 * GIB));
        let configs = plan.replicas.iter().map(|replica| {
            let flags = plan.choices(replica, plan.front_end.in_use);
            let flag = flags.into_iter().find(|choice| choice.flag == "--kv-transfer-config").unwrap();
            serde_json::from_str::<serde_json::Value>(&flag.value).unwrap()["kv_connector_extra_config"].clone()
        });
        let configs: Vec<_> = configs.collect();
        assert_eq!(configs[0], configs[1]);
        let (spec, tier) = (&configs[0]["spec_name"], &configs[0]["secondary_tiers"][0]);
        assert_eq!((spec.as_str(), tier["type"].as_str()), (Some("TieringOffloadingSpec"), Some("fs")));
        let root = tier["root_dir"].as_str().unwrap();
        assert!(root.starts_with("/fast/hostler-kv-") && root.ends_with("/0.33.0/org_model"), "{root}");
        // 128 KiB for each token of this model.
        assert!(
            plan.page().contains("files      about 1,638,400 tokens for all replicas, 200.0 GiB in /fast/hostler-kv-"),
            "{}",
            plan.page()
        );
    }

    #[test]
    fn a_blank_in_the_folder_divides_no_argument() {
        let pool = FilePoolPlan { folder: "/a b/pool".into(), bytes: GIB, tokens: 1, subfolder: "0.33.0/m".into() };
        let config = pool.tier_config();
        assert!(!config.contains(' '), "{config}");
        let whole: serde_json::Value = serde_json::from_str(&format!("{{{}}}", &config[1..])).unwrap();
        assert_eq!(whole["secondary_tiers"][0]["root_dir"], "/a b/pool/0.33.0/m");
    }

    #[test]
    fn hosts_that_cannot_keep_files_say_why() {
        let disk = FileRoom::Disk(1024 * GIB);
        assert!(reason(33, "off", disk).contains("agent.host_cache is off"));
        assert!(reason(32, "256GiB", disk).contains("it needs vLLM 0.33"));
        assert!(reason(33, "256GiB", FileRoom::Missing).contains("agent.file_cache_dir, \"/fast\", is no folder of this host"));
        assert!(reason(33, "256GiB", FileRoom::Shared).contains("other hosts share"));
        assert!(reason(33, "256GiB", FileRoom::Disk(100 * GIB)).contains("has room for 99.0 GiB and not for 200.0 GiB"));
    }

    #[test]
    fn files_in_memory_count_with_the_copies_there() {
        assert!(reason(33, "256GiB", FileRoom::Memory(400 * GIB)).contains("has room for 142.0 GiB"));
        assert!(matches!(planned(33, "256GiB", FileRoom::Memory(512 * GIB)).file_cache, FileCache::On(_)));
    }
}
