use super::*;

/// Words of real chat templates around a call.
const QWEN3: &str = "{% if tools %}<tool_call>{\"name\": <function-name>}</tool_call>{% endif %}<think>\\n\\n</think>";
const LLAMA3: &str = "<|start_header_id|>system Environment: ipython {% if tools is not none %}{\"name\": function name}";
const MISTRAL: &str = "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]";
const DEEPSEEK_R1: &str = "tools<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>```json<think>";
const DEEPSEEK_V31: &str = "tools<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{% if thinking %}<think>";
const QWEN3_CODER: &str = "tools<tool_call>\\n<function=example>\\n<parameter=a>\\n</parameter></tool_call>";
const GLM47: &str = "tools<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key></tool_call><think>";

fn names(architecture: &str, template: Option<&str>) -> (Option<&'static str>, Option<&'static str>) {
    let chosen = InstalledParsers::Assumed.choose(architecture, template);
    (chosen.tools.ok(), chosen.reasoning.ok())
}

#[test]
fn each_family_gets_its_parsers() {
    for (architecture, template, expected) in [
        ("Qwen3ForCausalLM", Some(QWEN3), (Some("hermes"), Some("qwen3"))),
        ("Qwen3MoeForCausalLM", Some(QWEN3_CODER), (Some("qwen3_coder"), None)),
        ("LlamaForCausalLM", Some(LLAMA3), (Some("llama3_json"), None)),
        ("MistralForCausalLM", Some(MISTRAL), (Some("mistral"), None)),
        ("DeepseekV3ForCausalLM", Some(DEEPSEEK_R1), (Some("deepseek_v3"), Some("deepseek_r1"))),
        ("DeepseekV3ForCausalLM", Some(DEEPSEEK_V31), (Some("deepseek_v31"), Some("deepseek_v3"))),
        ("DeepseekV32ForCausalLM", None, (Some("deepseek_v32"), Some("deepseek_v3"))),
        ("GptOssForCausalLM", Some("tools <|channel|>"), (Some("openai"), Some("openai_gptoss"))),
        ("Glm4MoeForCausalLM", Some(GLM47), (Some("glm47"), Some("glm45"))),
        ("LlamaForCausalLM", Some("{{ messages }}"), (None, None)),
        ("LlamaForCausalLM", None, (None, None)),
    ] {
        assert_eq!(names(architecture, template), expected, "{architecture} {template:?}");
    }
}

#[test]
fn only_parsers_of_the_release_are_chosen() {
    let output = "folder /x\ntool-parser hermes\ntool-parser qwen3_xml\nreasoning-parser deepseek_r1\n0.32.0\n";
    let installed = InstalledParsers::from_output(output);
    assert_eq!(installed.choose("Qwen3ForCausalLM", Some(QWEN3_CODER)).tools, Ok("qwen3_xml"), "the second best");
    let qwen3 = installed.choose("Qwen3ForCausalLM", Some(QWEN3));
    assert_eq!((qwen3.tools, qwen3.reasoning), (Ok("hermes"), Err("the installed front-end has no qwen3".to_owned())));
    assert_eq!(installed.choose("MistralForCausalLM", Some(MISTRAL)).tools, Err("the installed front-end has no mistral".to_owned()));
    assert_eq!(InstalledParsers::default().choose("Qwen3ForCausalLM", Some(QWEN3)).tools.ok(), None);
}

#[test]
fn a_template_without_tools_gets_no_parser_of_calls() {
    let plain = QWEN3.replace("tools", "");
    assert_eq!(InstalledParsers::Assumed.choose("Qwen3ForCausalLM", Some(&plain)).tools, Err(NO_TOOLS.to_owned()));
}

#[test]
fn the_rust_front_ends_refusal_names_its_parsers() {
    let refused = "Caused by:\n  tool parser `?` is not registered (choose from: hermes, qwen3_xml)\n";
    assert_eq!(named_in_refusal(refused).into_iter().collect::<Vec<_>>(), ["hermes", "qwen3_xml"]);
    assert!(named_in_refusal("error: unrecognized subcommand 'render'").is_empty());
}

#[tokio::test]
async fn a_front_end_that_cannot_be_asked_has_no_parsers() {
    assert_eq!(InstalledParsers::of_rust_front_end(Path::new("/nonexistent"), None).await, InstalledParsers::default());
}
