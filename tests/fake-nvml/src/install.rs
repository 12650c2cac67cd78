//! Installation for tests in Rust: a copy of the library in a directory of the test, with its file.

use std::path::{Path, PathBuf};

use crate::state::{Device, State};

#[derive(Debug)]
pub struct Fake {
    library: PathBuf,
    state: State,
}

impl Fake {
    /// Puts the library into `directory`, with these GPUs.
    ///
    /// # Panics
    /// When the library was not built, or cannot be copied.
    #[must_use]
    pub fn install(directory: &Path, devices: Vec<Device>) -> Self {
        // Cargo puts the library beside the test, and a program's dependencies into `deps` beside
        // the program.
        let test = std::env::current_exe().expect("a test knows its own path");
        let beside = test.parent().expect("a program is in a directory");
        let built = [beside.to_owned(), beside.join("deps")].map(|directory| directory.join("libhostler_fake_nvml.so"));
        let built = built.iter().find(|path| path.exists()).unwrap_or_else(|| panic!("there is no {}", built[0].display()));
        let library = directory.join("libnvidia-ml.so");
        std::fs::copy(built, &library).expect("the library can be copied");
        let fake = Self { library, state: State { devices } };
        fake.write();
        fake
    }

    /// Path for `HOSTLER_NVML_LIB`.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Changes the driver's answers about one GPU.
    pub fn change(&mut self, index: usize, change: impl FnOnce(&mut Device)) {
        change(&mut self.state.devices[index]);
        self.write();
    }

    /// Writes the file atomically, because the library may read at any moment.
    fn write(&self) {
        let text = serde_json::to_string(&self.state).expect("it has only plain fields");
        let path = |end: &str| PathBuf::from(format!("{}.{end}", self.library.display()));
        std::fs::write(path("new"), text).and_then(|()| std::fs::rename(path("new"), path("json"))).expect("the file can be written");
    }
}
