//! The files of a model's folder that an engine may read, and the name of their copy.
//!
//! Blocks on the disk.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hostler_tls::hex;
use sha2::{Digest, Sha256};

use super::error::StageError;

/// Most files of a model. The largest have some hundred.
const MAX_FILES: usize = 10_000;

/// Deepest folder inside a model's.
const MAX_DEPTH: usize = 4;

/// Folders inside of Hugging Face repositories that hold the same weights for other programs.
const OTHER_PROGRAMS: [&str; 6] = [".cache", ".git", "metal", "onnx", "openvino", "original"];

/// Formats of weights that vLLM leaves alone where there are safetensors.
const OTHER_FORMATS: [&str; 7] = ["bin", "gguf", "h5", "msgpack", "onnx", "pt", "pth"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceFile {
    /// Inside the folder.
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    modified: (i64, i64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceFolder {
    /// Without links.
    pub(crate) path: PathBuf,
    /// Sorted by path.
    pub(crate) files: Vec<SourceFile>,
}

impl SourceFolder {
    /// Lists a folder, and follows links, of which Hugging Face's cache consists.
    ///
    /// `any_format` keeps weights of all formats, because the engine was told which to load.
    pub(crate) fn list(folder: &Path, any_format: bool) -> Result<Self, StageError> {
        let path = fs::canonicalize(folder).ok().filter(|path| path.is_dir()).ok_or_else(|| StageError::NoFolder(folder.to_owned()))?;
        let mut files = Vec::new();
        let mut seen = 0;
        let mut folders = vec![(PathBuf::new(), 0)];
        while let Some((inside, depth)) = folders.pop() {
            let here = path.join(&inside);
            for entry in fs::read_dir(&here).map_err(|error| StageError::source(&here, error))? {
                let entry = entry.map_err(|error| StageError::source(&here, error))?;
                seen += 1;
                if seen > MAX_FILES {
                    return Err(StageError::TooManyFiles(MAX_FILES));
                }
                let name = inside.join(entry.file_name());
                if name.to_str().is_none() {
                    return Err(StageError::NotUtf8(entry.path()));
                }
                let about = fs::metadata(entry.path()).map_err(|error| StageError::source(&entry.path(), error))?;
                if about.is_dir() && depth < MAX_DEPTH && !OTHER_PROGRAMS.iter().any(|other| entry.file_name() == *other) {
                    folders.push((name, depth + 1));
                } else if about.is_file() {
                    files.push(SourceFile { path: name, bytes: about.len(), modified: (about.mtime(), about.mtime_nsec()) });
                }
            }
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        if !any_format {
            leave_out_other_formats(&mut files);
        }
        Ok(Self { path, files })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Name of the copy: another place, file, size or time of a change makes another one.
    pub(crate) fn digest(&self) -> String {
        let mut digest = Sha256::new();
        let mut add = |field: &[u8]| {
            digest.update((field.len() as u64).to_le_bytes());
            digest.update(field);
        };
        add(self.path.as_os_str().as_bytes());
        for SourceFile { path, bytes, modified: (seconds, nanoseconds) } in &self.files {
            add(path.as_os_str().as_bytes());
            [bytes.to_le_bytes(), seconds.to_le_bytes(), nanoseconds.to_le_bytes()].iter().for_each(|number| add(number));
        }
        hex(&digest.finalize())[..32].to_owned()
    }

    /// The first file that is not any longer as it was listed.
    pub(crate) fn changed_file(&self) -> Option<PathBuf> {
        let is_same = |file: &&SourceFile| {
            let about = fs::metadata(self.path.join(&file.path));
            about.is_ok_and(|about| about.len() == file.bytes && (about.mtime(), about.mtime_nsec()) == file.modified)
        };
        self.files.iter().find(|file| !is_same(file)).map(|file| self.path.join(&file.path))
    }
}

fn leave_out_other_formats(files: &mut Vec<SourceFile>) {
    let is_outermost = |file: &SourceFile| file.path.components().count() == 1;
    let has =
        |file: &SourceFile, formats: &[&str]| file.path.extension().is_some_and(|ending| formats.iter().any(|format| ending == *format));
    if files.iter().any(|file| is_outermost(file) && has(file, &["safetensors"])) {
        files.retain(|file| !(is_outermost(file) && has(file, &OTHER_FORMATS)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(folder: &SourceFolder) -> Vec<&str> {
        folder.files.iter().map(|file| file.path.to_str().unwrap()).collect()
    }

    #[test]
    fn links_of_a_download_cache_are_followed() {
        let cache = tempfile::tempdir().unwrap();
        let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/abc"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(blobs.join("1"), "weights").unwrap();
        symlink("../../blobs/1", snapshot.join("model.safetensors")).unwrap();
        let listed = SourceFolder::list(&snapshot, false).unwrap();
        assert_eq!((names(&listed), listed.bytes()), (vec!["model.safetensors"], 7));
        symlink("../../blobs/2", snapshot.join("tokenizer.json")).unwrap();
        assert!(matches!(SourceFolder::list(&snapshot, false), Err(StageError::Source { .. })), "it is not downloaded whole");
    }

    #[test]
    fn the_same_weights_for_other_programs_are_left_out() {
        let model = tempfile::tempdir().unwrap();
        let write = |name: &str| {
            let path = model.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        };
        ["config.json", "pytorch_model.bin", "1_Pooling/config.json", "1_Pooling/a.bin", "original/consolidated.00.pth"]
            .iter()
            .for_each(|name| write(name));
        let listed = |any| SourceFolder::list(model.path(), any).unwrap();
        assert_eq!(names(&listed(false)), ["1_Pooling/a.bin", "1_Pooling/config.json", "config.json", "pytorch_model.bin"]);
        write("model.safetensors");
        assert_eq!(names(&listed(false)), ["1_Pooling/a.bin", "1_Pooling/config.json", "config.json", "model.safetensors"]);
        assert!(names(&listed(true)).contains(&"pytorch_model.bin"), "the engine was told what to load");
    }

    #[test]
    fn a_name_that_is_not_utf8_is_refused_before_anything_is_copied() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        let model = tempfile::tempdir().unwrap();
        fs::write(model.path().join(OsStr::from_bytes(b"\xff")), "").unwrap();
        assert!(matches!(SourceFolder::list(model.path(), false), Err(StageError::NotUtf8(_))));
    }

    #[test]
    fn a_changed_file_makes_another_copy() {
        let model = tempfile::tempdir().unwrap();
        let file = model.path().join("config.json");
        fs::write(&file, "{}").unwrap();
        let first = SourceFolder::list(model.path(), false).unwrap();
        assert_eq!(first.changed_file(), None);
        fs::File::options().write(true).open(&file).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(first.changed_file(), Some(fs::canonicalize(&file).unwrap()));
        assert_ne!(SourceFolder::list(model.path(), false).unwrap().digest(), first.digest());
    }
}
