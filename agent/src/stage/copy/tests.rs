//! Real files in a temporary folder, in small blocks.

use std::os::unix::fs::PermissionsExt;

use super::*;

const BLOCK: u64 = 4096;

struct Scene {
    _place: tempfile::TempDir,
    source: SourceFolder,
    entry: PathBuf,
}

impl Scene {
    /// A model of two files, one of which has several blocks.
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let (folder, entry) = (place.path().join("m"), place.path().join("entry"));
        fs::create_dir_all(folder.join("inner")).unwrap();
        fs::create_dir(&entry).unwrap();
        let bytes: Vec<u8> = (0..BLOCK * 3 + 100).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect();
        fs::write(folder.join("model.safetensors"), bytes).unwrap();
        fs::write(folder.join("inner/config.json"), "{}").unwrap();
        fs::write(folder.join("empty"), "").unwrap();
        let source = SourceFolder::list(&folder, false).unwrap();
        Self { _place: place, source, entry }
    }

    fn copy<'a>(&'a self, progress: &'a StageProgress) -> Copy<'a> {
        Copy { source: &self.source, entry: &self.entry, block_bytes: BLOCK, progress }
    }

    /// Checks and copies; returns the bytes that were read from the source.
    fn stage(&self) -> Result<u64, StageError> {
        let progress = StageProgress::default();
        let copy = self.copy(&progress);
        copy.run(copy.check(Manifest::read(&self.entry))?)?;
        Ok(progress.bytes_read())
    }

    fn is_whole(&self) -> bool {
        let progress = StageProgress::default();
        let copy = self.copy(&progress);
        copy.check(Manifest::read(&self.entry)).unwrap().iter().all(Option::is_some)
    }

    fn is_equal(&self) -> bool {
        let same = |file: &SourceFile| {
            fs::read(self.source.path.join(&file.path)).unwrap() == fs::read(self.entry.join("model").join(&file.path)).unwrap()
        };
        self.source.files.iter().all(same)
    }

    fn weights(&self) -> PathBuf {
        self.entry.join("model/model.safetensors")
    }
}

#[test]
fn a_model_is_read_once_and_then_only_looked_at() {
    let scene = Scene::new();
    assert!(!scene.is_whole());
    assert_eq!(scene.stage().unwrap(), scene.source.bytes());
    assert!(scene.is_equal() && scene.is_whole());
    assert_eq!(scene.stage().unwrap(), 0);
}

#[test]
fn a_copy_that_was_killed_goes_on_inside_a_file() {
    let scene = Scene::new();
    scene.stage().unwrap();
    // As it is after two of five blocks: the file has its size, and what is not copied is nothing.
    let journal = Journal::open(&scene.entry).unwrap();
    let file = scene.source.files.iter().position(|file| file.bytes > BLOCK).unwrap();
    let manifest = Manifest::read(&scene.entry).unwrap();
    [0, 2].iter().for_each(|&block| journal.note((file, block), &manifest.files[file].blocks[usize::try_from(block).unwrap()]).unwrap());
    let weights = OpenOptions::new().write(true).open(scene.weights()).unwrap();
    weights.write_all_at(&[0; 4096], BLOCK).unwrap();
    weights.write_all_at(&[0; 100], BLOCK * 3).unwrap();
    fs::remove_file(scene.entry.join("manifest.json")).unwrap();
    // The last line was cut off.
    let path = scene.entry.join("journal");
    fs::write(&path, format!("{}00000001 0000", fs::read_to_string(&path).unwrap())).unwrap();
    assert_eq!(scene.stage().unwrap(), scene.source.bytes() - 2 * BLOCK);
    assert!(scene.is_equal() && scene.is_whole());
    assert!(!path.exists(), "it is not needed any longer");
}

#[test]
fn a_noted_block_that_the_disk_lost_is_copied_again() {
    let scene = Scene::new();
    scene.stage().unwrap();
    let journal = Journal::open(&scene.entry).unwrap();
    let manifest = Manifest::read(&scene.entry).unwrap();
    let file = scene.source.files.iter().position(|file| file.bytes > BLOCK).unwrap();
    (0..4).for_each(|block| journal.note((file, block as u64), &manifest.files[file].blocks[block]).unwrap());
    OpenOptions::new().write(true).open(scene.weights()).unwrap().write_all_at(&[9; 10], BLOCK * 2).unwrap();
    fs::remove_file(scene.entry.join("manifest.json")).unwrap();
    assert_eq!(scene.stage().unwrap(), BLOCK + 2, "the block, and the file that was not noted");
    assert!(scene.is_equal());
}

#[test]
fn only_a_damaged_file_is_copied_again() {
    let scene = Scene::new();
    scene.stage().unwrap();
    let bytes = fs::metadata(scene.weights()).unwrap().len();
    OpenOptions::new().write(true).open(scene.weights()).unwrap().write_all_at(&[9; 10], 5000).unwrap();
    assert!(!scene.is_whole());
    assert_eq!(scene.stage().unwrap(), bytes);
    assert!(scene.is_equal());
    fs::remove_file(scene.entry.join("model/inner/config.json")).unwrap();
    assert_eq!(scene.stage().unwrap(), 2);
    OpenOptions::new().write(true).open(scene.weights()).unwrap().set_len(7).unwrap();
    assert_eq!(scene.stage().unwrap(), bytes, "its size is checked, too");
}

#[test]
fn a_file_that_was_only_touched_is_hashed_and_not_copied() {
    let scene = Scene::new();
    scene.stage().unwrap();
    File::open(scene.weights()).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let progress = StageProgress::default();
    let copy = scene.copy(&progress);
    let checked = copy.check(Manifest::read(&scene.entry)).unwrap();
    assert!(checked.iter().all(Option::is_some) && !copy.is_recorded(&checked));
    assert_eq!(scene.stage().unwrap(), 0);
    assert!(copy.is_recorded(&checked), "the next check need not hash it");
}

#[test]
fn a_source_that_changes_or_cannot_be_read_is_an_error_with_its_name() {
    let scene = Scene::new();
    let config = scene.source.path.join("inner/config.json");
    fs::set_permissions(&config, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&config, "[]").unwrap();
    fs::File::options().write(true).open(&config).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert!(matches!(scene.stage(), Err(StageError::SourceChanged(path)) if path == config));
    fs::remove_file(&config).unwrap();
    assert!(matches!(scene.stage(), Err(StageError::Source { path, .. }) if path == config));
    assert!(!scene.is_whole());
}

#[test]
fn a_copy_that_nobody_waits_for_ends() {
    let scene = Scene::new();
    let progress = StageProgress::default();
    progress.cancel();
    let copy = scene.copy(&progress);
    assert!(matches!(copy.run(vec![None; 3]), Err(StageError::Cancelled)));
}
