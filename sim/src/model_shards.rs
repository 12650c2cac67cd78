//! The files of a model's folder, read as an engine with weights reads them: once, at its start.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::args::EngineArgs;
use crate::error::Error;

/// Files that are still to be read, in shards.
#[derive(Debug, Default)]
pub(crate) struct ModelShards(std::vec::IntoIter<Vec<PathBuf>>);

impl ModelShards {
    /// Shares the folder's files out to at most so many shards; there are none unless they are to
    /// be read.
    pub(crate) fn list(args: &EngineArgs, shards: u32) -> Result<Self, Error> {
        if !args.sim_read_model {
            return Ok(Self::default());
        }
        let folder = Path::new(&args.model);
        let list = || fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>();
        let mut files: Vec<PathBuf> = list().map_err(|source| Error::Model { path: folder.to_owned(), source })?;
        files.retain(|file| file.is_file());
        files.sort_unstable();
        let each = files.len().div_ceil(shards as usize).max(1);
        Ok(Self(files.chunks(each).map(<[PathBuf]>::to_vec).collect::<Vec<_>>().into_iter()))
    }

    /// Reads the files of the next shard, if there is one.
    pub(crate) async fn read_next(&mut self) -> Result<(), Error> {
        let Some(files) = self.0.next() else { return Ok(()) };
        let reading = tokio::task::spawn_blocking(move || files.iter().try_for_each(|file| read_whole(file)));
        reading.await.expect("reading files does not panic")
    }
}

fn read_whole(path: &Path) -> Result<(), Error> {
    let read = || io::copy(&mut File::open(path)?, &mut io::sink());
    read().map(drop).map_err(|source| Error::Model { path: path.to_owned(), source })
}
