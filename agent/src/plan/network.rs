//! Network between the nodes of a replica, as far as NCCL's choice is known beforehand.
//!
//! NCCL takes InfiniBand by itself. For Slingshot and others it needs a plug-in, which sites name
//! in its variables; without one it uses plain sockets.

use std::path::Path;

/// Folder of the kernel with an entry for each device of InfiniBand and RoCE.
const RDMA_DEVICES: &str = "/sys/class/infiniband";

/// Devices that are named in a sentence.
const MAX_NAMED: usize = 4;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NcclTransport {
    /// The nodes are only described.
    #[default]
    Unknown,
    /// Plain sockets, for this reason.
    Sockets(String),
    /// A faster network, and the sign of it.
    Fast(String),
}

impl NcclTransport {
    /// Transport on this host, from its devices and this process's environment.
    #[must_use]
    pub fn detect() -> Self {
        Self::of(Path::new(RDMA_DEVICES), |name| std::env::var(name).ok())
    }

    fn of(devices: &Path, variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let Some(net) = set("NCCL_NET") {
            let because = format!("NCCL_NET is {net}");
            return if net.eq_ignore_ascii_case("socket") { Self::Sockets(because) } else { Self::Fast(because) };
        }
        if let Some(provider) = set("FI_PROVIDER") {
            let because = format!("FI_PROVIDER is {provider}");
            return if provider.contains("tcp") || provider.contains("sockets") { Self::Sockets(because) } else { Self::Fast(because) };
        }
        let mut names: Vec<String> = std::fs::read_dir(devices)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .take(MAX_NAMED)
            .collect();
        names.sort();
        match set("NCCL_IB_DISABLE") {
            _ if names.is_empty() => Self::Sockets(format!("{RDMA_DEVICES} is empty, and neither NCCL_NET nor FI_PROVIDER is set")),
            Some(value) if value != "0" => Self::Sockets(format!("NCCL_IB_DISABLE is {value}")),
            _ => Self::Fast(format!("it has {}", names.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_variables_tell_what_nccl_will_use() {
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(with.path().join("mlx5_0")).unwrap();
        let of = |folder: &tempfile::TempDir, set: &[(&str, &str)]| {
            NcclTransport::of(folder.path(), |name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
        };
        let is_fast = |folder, set| matches!(of(folder, set), NcclTransport::Fast(_));
        assert_eq!(of(&with, &[]), NcclTransport::Fast("it has mlx5_0".to_owned()));
        assert!(!is_fast(&without, &[]) && !is_fast(&without, &[("NCCL_NET", "")]));
        assert!(is_fast(&without, &[("NCCL_NET", "AWS Libfabric")]) && is_fast(&without, &[("FI_PROVIDER", "cxi")]));
        assert!(!is_fast(&with, &[("NCCL_NET", "Socket")]) && !is_fast(&with, &[("NCCL_IB_DISABLE", "1")]));
        assert!(!is_fast(&without, &[("FI_PROVIDER", "tcp;ofi_rxm")]));
        assert!(matches!(NcclTransport::of(Path::new("/nonexistent"), |_| None), NcclTransport::Sockets(_)));
    }
}
