use prost_types::value::Kind;
use tonic::Code;
use tonic_types::StatusExt;

use super::*;

fn value(kind: Kind) -> prost_types::Value {
    prost_types::Value { kind: Some(kind) }
}

fn text(text: &str) -> wire::ContentPart {
    wire::ContentPart { part: Some(Part::Text(text.into())) }
}

fn message(role: &str, content: Vec<wire::ContentPart>) -> wire::Message {
    wire::Message { role: role.into(), content, ..wire::Message::default() }
}

fn body(request: EngineRequest) -> String {
    String::from_utf8(request.body.to_vec()).unwrap()
}

fn field(refused: Result<EngineRequest, Status>) -> String {
    let status = refused.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    status.get_error_details().bad_request().unwrap().field_violations[0].field.clone()
}

#[test]
fn a_full_chat_becomes_the_engines_request() {
    let call = wire::ToolCall { id: "call-1".into(), name: "look".into(), arguments: r#"{"at":"it"}"#.into() };
    let image = wire::ContentPart { part: Some(Part::ImageUrl("data:image/png;base64,AA".into())) };
    let sound = prost_types::Struct { fields: [("type".to_owned(), value(Kind::StringValue("input_audio".into())))].into() };
    let sound = wire::ContentPart { part: Some(Part::Other(sound)) };
    let messages = vec![
        message("system", vec![text("Be brief.")]),
        message("user", vec![text("What is this?"), image, sound]),
        wire::Message { role: "assistant".into(), tool_calls: vec![call], reasoning: "I look.".into(), ..wire::Message::default() },
        wire::Message { tool_call_id: "call-1".into(), name: "look".into(), ..message("tool", vec![text("A locomotive")]) },
        message("user", vec![]),
    ];
    let template = prost_types::Struct { fields: [("enable_thinking".to_owned(), value(Kind::BoolValue(false)))].into() };
    let extra = prost_types::Struct { fields: [("truncate_prompt_tokens".to_owned(), value(Kind::NumberValue(100.0)))].into() };
    let request = wire::GenerateRequest {
        model: "an-adapter".into(),
        prompt: Some(Prompt::Chat(wire::Chat {
            messages,
            template_arguments: Some(template),
            continue_final_message: true,
            ..Default::default()
        })),
        sampling: Some(wire::Sampling {
            max_tokens: Some(16),
            temperature: Some(0.7),
            top_k: Some(-1),
            seed: Some(-5),
            stop: vec!["\n".into()],
            stop_token_ids: vec![2],
            logprobs: Some(3),
            ignore_eos: true,
            logit_bias: [(7, -100.0), (3, 1.5)].into(),
            ..Default::default()
        }),
        tools: vec![wire::Tool {
            name: "look".into(),
            description: "Looks".into(),
            parameters_json: r#"{"type":"object","properties":{"z":{},"a":{}}}"#.into(),
            strict: Some(true),
        }],
        tool_choice: Some(wire::ToolChoice { choice: Some(wire::tool_choice::Choice::Mode(wire::tool_choice::Mode::Required.into())) }),
        response_format: Some(wire::ResponseFormat { format: Some(Format::JsonSchema(r#"{"required":["z","a"]}"#.into())) }),
        user: "somebody".into(),
        cache_salt: "salt".into(),
        return_token_ids: true,
        extra: Some(extra),
        ..Default::default()
    };
    let request = generate_request(request, HeaderMap::new(), true).unwrap();
    assert_eq!(request.path, "/v1/chat/completions");
    let body: Value = serde_json::from_slice(&request.body).unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&body).unwrap());
}

#[test]
fn texts_and_tokens_become_minimal_completion_requests() {
    let of = |prompt| wire::GenerateRequest { prompt: Some(prompt), ..Default::default() };
    let plain = generate_request(of(Prompt::Text("Once".into())), HeaderMap::new(), false).unwrap();
    assert_eq!((plain.path, body(plain).as_str()), ("/v1/completions", r#"{"prompt":"Once","stream":false}"#));
    let tokens = of(Prompt::Tokens(wire::TokenIds { ids: vec![1, 4_294_967_295] }));
    let tokens = wire::GenerateRequest { sampling: Some(wire::Sampling { logprobs: Some(0), ..Default::default() }), ..tokens };
    assert_eq!(
        body(generate_request(tokens, HeaderMap::new(), true).unwrap()),
        r#"{"logprobs":0,"stream":true,"stream_options":{"include_usage":true},"prompt":[1,4294967295]}"#
    );
}

#[test]
fn each_answer_format_has_its_engine_field() {
    for (format, expected) in [
        (Format::JsonObject(true), r#""response_format":{"type":"json_object"},"#),
        (Format::JsonObject(false), ""),
        (Format::Regex("a+".into()), r#""structured_outputs":{"regex":"a+"},"#),
        (Format::Grammar("root ::= x".into()), r#""structured_outputs":{"grammar":"root ::= x"},"#),
        (Format::Choice(wire::Choices { texts: vec!["a".into(), "b".into()] }), r#""structured_outputs":{"choice":["a","b"]},"#),
        (Format::StructuralTag("{}".into()), r#""structured_outputs":{"structural_tag":"{}"},"#),
    ] {
        let request = wire::GenerateRequest {
            prompt: Some(Prompt::Text("x".into())),
            response_format: Some(wire::ResponseFormat { format: Some(format) }),
            ..Default::default()
        };
        assert_eq!(
            body(generate_request(request, HeaderMap::new(), false).unwrap()),
            format!(r#"{{"prompt":"x",{expected}"stream":false}}"#)
        );
    }
}

#[test]
fn a_calls_headers_are_passed_on_without_grpcs_own() {
    let pairs = [
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("grpc-timeout", "1S"),
        ("grpc-accept-encoding", "gzip"),
        ("accept-encoding", "identity, gzip"),
        ("own-bin", "AA"),
        ("authorization", "Bearer key"),
        ("traceparent", "00-1-2-03"),
        ("x-request-id", "of the metadata"),
    ];
    let headers: HeaderMap = pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect();
    let request = wire::GenerateRequest {
        prompt: Some(Prompt::Text("x".into())),
        priority: Some(-3),
        session: "talk".into(),
        request_id: "mine".into(),
        ..Default::default()
    };
    let headers = generate_request(request, headers, false).unwrap().headers;
    let mut left: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    left.sort();
    assert_eq!(
        left,
        [
            "authorization: Bearer key",
            "content-type: application/json",
            "traceparent: 00-1-2-03",
            "x-hostler-priority: -3",
            "x-request-id: mine",
            "x-session-id: talk",
        ]
    );
}

#[test]
fn an_invalid_request_is_refused_naming_its_field() {
    let of = |request: wire::GenerateRequest| field(generate_request(request, HeaderMap::new(), false));
    let text = || wire::GenerateRequest { prompt: Some(Prompt::Text("x".into())), ..Default::default() };
    let chat = |messages| wire::GenerateRequest {
        prompt: Some(Prompt::Chat(wire::Chat { messages, ..Default::default() })),
        ..Default::default()
    };
    let tool = |json: &str| wire::Tool { name: "t".into(), parameters_json: json.into(), ..Default::default() };
    let sampling = |sampling| wire::GenerateRequest { sampling: Some(sampling), ..text() };
    let extra = |name: &str| Some(prost_types::Struct { fields: [(name.to_owned(), value(Kind::BoolValue(false)))].into() });
    assert_eq!(of(wire::GenerateRequest::default()), "prompt");
    assert_eq!(of(wire::GenerateRequest { tools: vec![tool("")], ..text() }), "tools");
    assert_eq!(of(wire::GenerateRequest { tools: vec![tool(""), tool("{")], ..chat(vec![]) }), "tools[1].parameters_json");
    assert_eq!(of(chat(vec![message("user", vec![]), message("", vec![])])), "chat.messages[1].role");
    assert_eq!(of(chat(vec![message("user", vec![wire::ContentPart::default()])])), "chat.messages[0].content[0]");
    assert_eq!(of(sampling(wire::Sampling { top_p: Some(f64::NAN), ..Default::default() })), "sampling.top_p");
    assert_eq!(of(wire::GenerateRequest { extra: extra("stream"), ..text() }), "extra.stream");
    assert_eq!(of(wire::GenerateRequest { extra: extra("prompt"), ..text() }), "extra.prompt");
    assert_eq!(of(wire::GenerateRequest { request_id: "a\nb".into(), ..text() }), "request_id");
    assert_eq!(of(wire::GenerateRequest { session: "s".repeat(300), ..text() }), "session");
    assert_eq!(field(embed_request(wire::EmbedRequest::default(), HeaderMap::new())), "input");
}

#[test]
fn embeddings_are_requested_as_numbers() {
    use wire::embed_request::Input;
    let tokens = wire::TokenPrompts { prompts: vec![wire::TokenIds { ids: vec![1, 2] }, wire::TokenIds { ids: vec![3] }] };
    let request = wire::EmbedRequest { model: "m".into(), input: Some(Input::Tokens(tokens)), dimensions: Some(8), ..Default::default() };
    let request = embed_request(request, HeaderMap::new()).unwrap();
    assert_eq!(request.path, "/v1/embeddings");
    assert_eq!(body(request), r#"{"model":"m","encoding_format":"float","dimensions":8,"input":[[1,2],[3]]}"#);
}
