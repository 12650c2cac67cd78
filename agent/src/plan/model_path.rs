//! Check that a model named by a path exists, before anything is planned for it.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::PlanError;

/// Minimum similarity; names less similar are different things.
const MIN_SIMILARITY: f64 = 0.7;

/// Checks that a model named by a path exists.
///
/// Hugging Face's names are `name` or `owner/name`, and begin with neither a slash nor a dot.
pub(crate) fn check_model_path(model: &str) -> Result<(), PlanError> {
    let path = Path::new(model);
    if !model.starts_with(['/', '.', '~']) || path.exists() {
        return Ok(());
    }
    Err(PlanError::NoSuchModel { path: model.to_owned(), nearest: nearest_path(path) })
}

fn nearest_path(path: &Path) -> Option<PathBuf> {
    let mut missing = path;
    let folder = loop {
        let parent = missing.parent()?;
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        if parent.is_dir() {
            break parent;
        }
        missing = parent;
    };
    let missing_name = missing.file_name()?.to_string_lossy();
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let alike = names.map(|name| (strsim::jaro_winkler(&missing_name, &name.to_string_lossy()), name));
    let (_, name) = alike.filter(|(alike, _)| *alike >= MIN_SIMILARITY).max_by(|(a, _), (b, _)| a.total_cmp(b)).unwrap_or_default();
    let nearest = folder.join(name);
    nearest.parent().is_some().then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_model_path_is_refused_with_the_nearest_name() {
        let models = tempfile::tempdir().unwrap();
        fs::create_dir(models.path().join("qwen3-8b")).unwrap();
        fs::write(models.path().join("qwen3-8b/config.json"), "{}").unwrap();
        let named = |name: &str| check_model_path(models.path().join(name).to_str().unwrap());
        assert_eq!(named("qwen3-8b"), Ok(()));
        assert_eq!(named("qwen3-8b/config.json"), Ok(()), "as of a GGUF file");
        assert_eq!(check_model_path("org/name"), Ok(()), "which may be downloaded");
        let (folder, near) = (models.path().display(), models.path().join("qwen3-8b"));
        let error = named("qwen-8b").unwrap_err().to_string();
        assert_eq!(error, format!("--model {folder}/qwen-8b: there is no such file or folder; the nearest is {}", near.display()));
        let error = named("llama/base").unwrap_err().to_string();
        assert!(error.ends_with(&format!("the nearest is {folder}/")), "{error}");
    }
}
