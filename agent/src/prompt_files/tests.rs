//! Bundles of models made of small files in temporary folders.

use std::fs;

use tempfile::TempDir;

use super::*;
use crate::engine_client::api_client::tests::Scripted;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), files);
    folder
}

fn write(folder: &Path, files: &[(&str, &str)]) {
    fs::create_dir_all(folder).unwrap();
    files.iter().for_each(|(name, content)| fs::write(folder.join(name), content).unwrap());
}

fn arguments(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Names and contents of a model's files, or the error.
fn read(model: &str, arguments: &[String], cache: &Path) -> Result<Vec<(String, String)>, String> {
    let text = |file: wire::PromptFile| (file.name, String::from_utf8(file.content.to_vec()).unwrap());
    let files = TokenizerSpec::new(model, arguments).read(cache).map_err(|error| error.to_string())?;
    Ok(files.into_iter().map(text).collect())
}

fn pair(name: &str, content: &str) -> (String, String) {
    (name.to_owned(), content.to_owned())
}

fn path(folder: &TempDir) -> &str {
    folder.path().to_str().unwrap()
}

#[test]
fn a_folder_yields_its_prompt_files_in_a_fixed_order() {
    let model =
        folder(&[("chat_template.jinja", "{{}}"), ("config.json", "no"), ("tokenizer_config.json", "config"), ("tokenizer.json", "t")]);
    let files = read(path(&model), &[], Path::new("")).unwrap();
    assert_eq!(files, [pair("tokenizer.json", "t"), pair("tokenizer_config.json", "config"), pair("chat_template.jinja", "{{}}")]);
}

#[test]
fn only_equal_files_make_equal_bundles() {
    let bundle = |folder: &TempDir| Bundle::new(TokenizerSpec::new(path(folder), &[]).read(Path::new("")).unwrap());
    let (left, right) = (folder(&[("tokenizer.json", "t")]), folder(&[("tokenizer.json", "t")]));
    assert_eq!(bundle(&left), bundle(&right));
    assert_eq!(bundle(&left).hash.len(), 32);
    write(right.path(), &[("special_tokens_map.json", "{}")]);
    assert_ne!(bundle(&left).hash, bundle(&right).hash);
    let decoded = wire::PromptBundle::decode(bundle(&right).bytes).unwrap();
    assert_eq!(decoded.files.len(), 2);
}

#[test]
fn the_engines_arguments_decide_which_prompt_files_are_taken() {
    let model = folder(&[("tokenizer.json", "the model's"), ("chat_template.jinja", "its own")]);
    let other = folder(&[("tokenizer.json", "another"), ("my.jinja", "given")]);
    let line = format!("--tokenizer {} --chat-template={}/my.jinja", path(&other), path(&other));
    let files = read(path(&model), &arguments(&line), Path::new("")).unwrap();
    assert_eq!(files, [pair("tokenizer.json", "another"), pair("chat_template.jinja", "given")]);

    let inline = ["--chat-template".to_owned(), "{{ messages }}".to_owned()];
    assert_eq!(read(path(&model), &inline, Path::new("")).unwrap()[1], pair("chat_template.jinja", "{{ messages }}"));
    let error = read(path(&model), &arguments("--chat-template /nowhere/x.jinja"), Path::new("")).unwrap_err();
    assert!(error.starts_with("cannot read /nowhere/x.jinja"), "{error}");
}

#[test]
fn a_hugging_face_id_is_looked_up_among_downloaded_models() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--org--name");
    write(&repository.join("refs"), &[("main", "c0ffee\n"), ("v1", "beef")]);
    for commit in ["c0ffee", "beef"] {
        write(&repository.join("snapshots").join(commit), &[("tokenizer.json", commit)]);
    }
    for (line, expected) in [
        ("", "c0ffee"),
        ("--revision v1", "beef"),
        ("--revision c0ffee", "c0ffee"),
        ("--revision v2 --tokenizer-revision beef", "beef"),
        ("--tokenizer org/name", "c0ffee"),
    ] {
        let model = if line.contains("--tokenizer ") { "/no/such/folder" } else { "org/name" };
        assert_eq!(read(model, &arguments(line), cache.path()).unwrap(), [pair("tokenizer.json", expected)], "{line}");
    }
    for (model, line) in [("org/name", "--revision v2"), ("org/other", ""), ("../../etc", "")] {
        let error = read(model, &arguments(line), cache.path()).unwrap_err();
        assert!(error.contains("neither a folder nor downloaded"), "{error}");
    }
}

#[test]
fn a_model_with_an_unshareable_tokenizer_is_an_error() {
    let empty = folder(&[("tokenizer.model", "sentencepiece")]);
    assert!(read(path(&empty), &[], Path::new("")).unwrap_err().starts_with("no tokenizer.json in /"));

    let model = folder(&[("tokenizer.json", "t")]);
    for line in ["--tokenizer-mode mistral", "--skip-tokenizer-init"] {
        assert!(read(path(&model), &arguments(line), Path::new("")).unwrap_err().contains(line), "{line}");
    }
    assert!(read(path(&model), &arguments("--tokenizer_mode=hf"), Path::new("")).is_ok());

    fs::File::create(model.path().join("tokenizer_config.json")).unwrap().set_len(MAX_BUNDLE_BYTES).unwrap();
    assert!(read(path(&model), &[], Path::new("")).unwrap_err().contains("more than 64 MiB"));

    fs::remove_file(model.path().join("tokenizer_config.json")).unwrap();
    fs::create_dir(model.path().join("tokenizer_config.json")).unwrap();
    assert!(read(path(&model), &[], Path::new("")).unwrap_err().contains("not a file"));
}

#[test]
fn only_engines_read_prompts_of_code_templates_and_other_tokenizers() {
    let reads = |architecture: &str, files: &[(&str, &str)], line: &str| {
        let model = folder(files);
        only_engine_reads_prompts(architecture, path(&model), &arguments(line), Path::new(""))
    };
    let tokenizer = [("tokenizer.json", "t")];
    assert!(!reads("Qwen3ForCausalLM", &tokenizer, ""));
    assert!(!reads("DeepseekV3ForCausalLM", &tokenizer, "--tokenizer-mode hf"));
    for architecture in ["GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration"] {
        assert!(reads(architecture, &tokenizer, ""), "{architecture}");
    }
    assert!(reads("CohereForCausalLM", &tokenizer, "--tokenizer-mode cohere"));
    assert!(reads("MistralForCausalLM", &[("tokenizer.json", "t"), ("tekken.json", "t")], ""));
    assert!(reads("DeepseekV3ForCausalLM", &[("tiktoken.model", "t")], ""), "Kimi K2");
    assert!(!only_engine_reads_prompts("MistralForCausalLM", "org/absent", &[], Path::new("")), "its files are not here");
}

#[tokio::test]
async fn a_simulated_engine_of_another_tokenizer_shares_no_files() {
    let config = AgentConfig { engine_args: arguments("--tokenizer-mode mistral"), ..AgentConfig::default() };
    let source = PromptFileSource::new(&EngineProgram::Simulated { program: "/opt/hostler".into() }, &config);
    let error = source.load(Path::new("/no/socket")).await.unwrap_err();
    assert!(error.to_string().contains("--tokenizer-mode mistral") && !error.is_transient(), "{error}");
}

#[test]
fn downloaded_models_are_searched_where_hugging_face_keeps_them() {
    let table: [(&[(&str, &str)], &str); 6] = [
        (&[("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("HOME", "/h")], "/a"),
        (&[("HUGGINGFACE_HUB_CACHE", "/a"), ("HOME", "/h")], "/a"),
        (&[("HF_HOME", "/b"), ("HOME", "/h")], "/b/hub"),
        (&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], "/x/huggingface/hub"),
        (&[("HF_HOME", ""), ("HOME", "/h")], "/h/.cache/huggingface/hub"),
        (&[], "hub"),
    ];
    for (set, expected) in table {
        let variable = |name: &str| set.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into());
        assert_eq!(hub_cache(variable), Path::new(expected), "{set:?}");
    }
}

#[tokio::test]
async fn prompt_files_are_loaded_from_the_models_folder() {
    let model = folder(&[("tokenizer.json", "t")]);
    let engine = EngineProgram::Vllm { program: "/opt/vllm".into(), container: None };
    let config = AgentConfig { model: path(&model).to_owned(), ..AgentConfig::default() };
    let bundle = PromptFileSource::new(&engine, &config).load(Path::new("/no/socket")).await.unwrap();
    let expected = wire::PromptFile { name: "tokenizer.json".to_owned(), content: Bytes::from_static(b"t") };
    assert_eq!(wire::PromptBundle::decode(bundle.bytes).unwrap().files, [expected]);
}

#[tokio::test]
async fn a_simulated_engine_is_asked_for_its_prompt_files() {
    let engine = Scripted::start(Box::new(|path| Some((if path.ends_with(".json") { 200 } else { 404 }, "{}".to_owned()))));
    let source = PromptFileSource::new(&EngineProgram::Simulated { program: "/opt/hostler".into() }, &AgentConfig::default());
    let bundle = source.load(&engine.socket).await.unwrap();
    let requests = engine.requests.lock().clone();
    assert_eq!(requests, ["/sim/model/tokenizer.json", "/sim/model/tokenizer_config.json"]);
    let names: Vec<String> = wire::PromptBundle::decode(bundle.bytes).unwrap().files.into_iter().map(|file| file.name).collect();
    assert_eq!(names, ["tokenizer.json", "tokenizer_config.json"]);
    assert!(source.load(Path::new("/no/socket")).await.unwrap_err().to_string().contains("/sim/model/tokenizer.json"));
}
