//! The commands that say what is wanted of a fleet of batch jobs: `hostler up --nodes`, `wait`, `scale` and `down`. They write it into the fleet's
//! folder, start the controller where none runs, and look on. The controller does the rest.

mod controller_process;
mod down;
mod entries;
mod progress;
mod scale;
mod up;
mod wait;
mod walltime;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::Context;
use hostler_controller::{ClusterConfig, FleetFolder};

use crate::settings::cluster_config;

pub(crate) use self::down::{DownArgs, down};
pub(crate) use self::scale::{ScaleArgs, scale};
pub(crate) use self::up::{UpArgs, up};
pub(crate) use self::wait::{WAIT_EXIT_CODES, WaitArgs, wait};
pub(crate) use self::watch::WatchError;

/// The user's fleet: its settings, its folder, and the file that the settings are from.
#[derive(Debug)]
struct Fleet {
    config: ClusterConfig,
    folder: FleetFolder,
    /// Absolute: jobs read it, too.
    file: Option<PathBuf>,
}

impl Fleet {
    fn open(file: Option<&Path>) -> anyhow::Result<Self> {
        let config = cluster_config(file)?;
        let folder = FleetFolder::open(&config)?;
        let file = file.map(std::path::absolute).transpose().context("there is no working directory")?;
        Ok(Self { config, folder, file })
    }
}
