//! Whole stages of a small model, by agents that share a folder.

use std::fs;

use super::entry::StageFolder;
use super::*;

struct Scene {
    place: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("m")).unwrap();
        fs::write(place.path().join("m/model.safetensors"), vec![7; 300_000]).unwrap();
        fs::write(place.path().join("m/config.json"), "{}").unwrap();
        Self { place }
    }

    fn model(&self) -> String {
        self.place.path().join("m").display().to_string()
    }

    fn config(&self) -> AgentConfig {
        let stage = self.place.path().join("stage").display().to_string();
        AgentConfig { model: self.model(), stage, ..AgentConfig::default() }
    }

    /// Another agent of this node.
    fn agent(&self) -> ModelStage {
        ModelStage::of(&self.config(), Arc::default()).unwrap()
    }

    fn entries(&self) -> Vec<PathBuf> {
        let folder = StageFolder::path_in(&self.place.path().join("stage"));
        let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }
}

fn line(words: &[&str]) -> CommandLine {
    let arguments = words.iter().map(OsString::from).collect();
    CommandLine { container: Vec::new(), program: "vllm".into(), arguments, set: Vec::new(), unset: Vec::new(), withheld_routes: &[] }
}

#[tokio::test]
async fn agents_of_one_node_have_one_copy() {
    let scene = Scene::new();
    let (one, other) = (scene.agent(), scene.agent());
    let (one, other) = tokio::join!(one.prepare(), other.prepare());
    let copy = one.folder().unwrap();
    assert_eq!(other.folder().as_ref(), Some(&copy));
    assert_eq!(fs::read(copy.join("model.safetensors")).unwrap(), vec![7; 300_000]);
    assert_eq!(scene.entries().len(), 1);
}

#[tokio::test]
async fn a_model_that_is_used_stays_and_the_oldest_of_the_others_goes() {
    let scene = Scene::new();
    let in_use = scene.agent().prepare().await;
    fs::write(scene.place.path().join("m/config.json"), "{ }").unwrap();
    drop(scene.agent().prepare().await);
    assert_eq!(scene.entries().len(), 2);
    fs::write(scene.place.path().join("m/config.json"), "{  }").unwrap();
    let bound = AgentConfig { stage_bytes: 650_000, ..scene.config() };
    let third = ModelStage::of(&bound, Arc::default()).unwrap().prepare().await;
    let left = scene.entries();
    let has = |model: &PreparedModel| left.contains(&model.folder().unwrap().parent().unwrap().to_owned());
    assert!(left.len() == 2 && has(&in_use) && has(&third), "{left:?}");
}

#[tokio::test]
async fn what_cannot_be_staged_is_read_where_it_lies() {
    let scene = Scene::new();
    let folder_of = async |config: AgentConfig| ModelStage::of(&config, Arc::default()).unwrap().prepare().await.folder();
    let file = scene.place.path().join("m/config.json").display().to_string();
    assert_eq!(folder_of(AgentConfig { stage: file, ..scene.config() }).await, None);
    assert_eq!(folder_of(AgentConfig { stage_bytes: 1000, ..scene.config() }).await, None);
    assert_eq!(folder_of(AgentConfig { model: "org/not-here".into(), ..scene.config() }).await, None);
    assert_eq!(folder_of(AgentConfig { stage: "$HOSTLER_NO_SUCH_VARIABLE/x".into(), ..scene.config() }).await, None);
    assert_eq!(folder_of(AgentConfig { stage: String::new(), ..scene.config() }).await, None);
    assert!(scene.entries().is_empty());
    let dummy = AgentConfig { engine_args: vec!["--load-format=dummy".into()], ..scene.config() };
    assert!(ModelStage::of(&dummy, Arc::default()).is_none(), "it reads no weights");
}

#[tokio::test]
async fn a_folder_that_others_may_enter_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new();
    let folder = StageFolder::path_in(&scene.place.path().join("stage"));
    fs::create_dir_all(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(scene.agent().prepare().await.folder(), None);
}

#[test]
fn the_engine_gets_the_copy_and_keeps_the_models_name() {
    let scene = Scene::new();
    let (model, copy) = (scene.model(), Path::new("/disk/copy"));
    let contained = CommandLine { container: ["apptainer", "exec", "v.sif"].map(OsString::from).into(), ..line(&["serve", &model]) };
    let words = scene.agent().redirect(&contained, copy).container;
    assert_eq!(words, ["apptainer", "exec", "--bind", copy.to_str().unwrap(), "v.sif"], "a container has the copy too");
    let redirected = scene.agent().redirect(&line(&["serve", &model, "--uds", "s"]), copy);
    assert_eq!(redirected, line(&["serve", "/disk/copy", "--uds", "s", "--served-model-name", &model]));
    let named = AgentConfig { engine_args: vec!["--served-model-name".into(), "chat".into()], ..scene.config() };
    let given = line(&["serve", &model, "--served-model-name", "chat"]);
    let redirected = ModelStage::of(&named, Arc::default()).unwrap().redirect(&given, copy);
    assert_eq!(redirected, line(&["serve", "/disk/copy", "--served-model-name", "chat"]));
    let card = Bytes::from(format!(r#"{{"id":"{model}","root":"/disk/copy","max_model_len":8}}"#));
    let restored = scene.agent().restore_card(&card, copy);
    assert_eq!(restored, format!(r#"{{"id":"{model}","root":"{model}","max_model_len":8}}"#));
}
