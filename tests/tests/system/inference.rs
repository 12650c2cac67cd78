//! The service `hostler.inference.v1.Inference` with generated stubs, on the port of the HTTP APIs.

use std::time::Duration;

use tokio::time::Instant;

mod beside;
mod bookings;
mod raw;

use futures_util::future::join_all;
use hostler_proto::inference::v1::finish::StoppedBy;
use hostler_proto::inference::v1::generate_event::Event;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{
    Chat, ContentPart, Delta, EmbedRequest, FinishReason, GenerateEvent, GenerateRequest, ListModelsRequest, Message, Sampling, Started,
    Texts, TokenIds, Tool, ToolChoice, Usage, content_part, embed_request, tool_choice,
};
use tonic::transport::{Channel, Endpoint as TonicEndpoint};
use tonic::{Code, IntoRequest, Status, Streaming};
use tonic_types::StatusExt;

use crate::harness::{Fleet, MODEL, Setup, soon, until};
use raw::Raw;

async fn client(fleet: &Fleet) -> InferenceClient<Channel> {
    let endpoint = TonicEndpoint::from_shared(format!("http://{}", fleet.routers[0].edge)).unwrap();
    InferenceClient::new(soon("a connection", endpoint.connect()).await.unwrap())
}

fn message(role: &str, text: &str) -> Message {
    let content = vec![ContentPart { part: Some(content_part::Part::Text(text.into())) }];
    Message { role: role.into(), content, ..Message::default() }
}

pub(crate) fn generation(prompt: Prompt, tokens: u32) -> GenerateRequest {
    let sampling = Sampling { max_tokens: Some(tokens), seed: Some(7), temperature: Some(0.0), ..Sampling::default() };
    GenerateRequest { model: MODEL.into(), prompt: Some(prompt), sampling: Some(sampling), ..GenerateRequest::default() }
}

fn chat(tokens: u32) -> GenerateRequest {
    let messages = vec![message("system", "You know engines."), message("user", "Tell me about engines.")];
    generation(Prompt::Chat(Chat { messages, ..Chat::default() }), tokens)
}

fn text(text: &str, tokens: u32) -> GenerateRequest {
    generation(Prompt::Text(text.into()), tokens)
}

/// Events of a whole stream, by kind.
#[derive(Debug, Default)]
struct StreamedAnswer {
    started: Option<Started>,
    deltas: Vec<Delta>,
    finishes: Vec<(u32, FinishReason)>,
    usage: Option<Usage>,
}

impl StreamedAnswer {
    fn text(&self, index: u32) -> String {
        self.deltas.iter().filter(|delta| delta.index == index).map(|delta| delta.text.as_str()).collect()
    }
}

async fn generate_streamed(
    client: &mut InferenceClient<Channel>,
    request: impl IntoRequest<GenerateRequest>,
) -> Result<StreamedAnswer, Status> {
    let mut stream = soon("a stream's beginning", client.generate_stream(request)).await?.into_inner();
    let mut answer = StreamedAnswer::default();
    while let Some(event) = soon("an event", stream.message()).await? {
        assert!(answer.usage.is_none(), "usage is the last event");
        match event.event.unwrap() {
            Event::Started(started) => {
                assert!(answer.started.replace(started).is_none() && answer.deltas.is_empty(), "it is the first event");
            }
            Event::Delta(delta) => answer.deltas.push(delta),
            Event::Finish(finish) => answer.finishes.push((finish.index, finish.reason())),
            Event::Usage(usage) => answer.usage = Some(usage),
        }
    }
    Ok(answer)
}

/// Begins a stream that does not end by itself, and waits until it runs.
async fn endless(client: &mut InferenceClient<Channel>, prompt: &str) -> Streaming<GenerateEvent> {
    let mut request = text(prompt, 10_000);
    request.sampling.as_mut().unwrap().ignore_eos = true;
    let mut stream = soon("a stream's beginning", client.generate_stream(request)).await.unwrap().into_inner();
    for _ in 0..3 {
        assert!(soon("an event", stream.message()).await.unwrap().is_some());
    }
    stream
}

async fn running(fleet: &Fleet, replica: &str) -> f64 {
    fleet.engine(replica).await.metric("vllm:num_requests_running").await
}

/// Time after `leave` until the engine runs nothing.
async fn gone_after<T>(fleet: &Fleet, leave: impl Future<Output = T>) -> Duration {
    let engine = fleet.engine("n0/0").await;
    leave.await;
    let left = Instant::now();
    until("nothing running", async || match engine.metric("vllm:num_requests_running").await {
        0.0 => Ok(()),
        count => Err(format!("{count} requests run")),
    })
    .await;
    left.elapsed()
}

/// Fastest of some attempts, because other tests run beside this one.
async fn fastest(mut attempt: impl AsyncFnMut() -> Duration) -> Duration {
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        fastest = fastest.min(attempt().await);
        if fastest < Duration::from_millis(200) {
            break;
        }
    }
    fastest
}

#[tokio::test(start_paused = true)]
async fn texts_chats_and_tokens_are_answered_with_usage_and_placement() {
    let fleet = Fleet::start(Setup::two_agents().engine("--enable-prompt-tokens-details")).await;
    let mut client = client(&fleet).await;
    let tokens = generation(Prompt::Tokens(TokenIds { ids: vec![11, 12, 13, 14, 15] }), 4);
    let (of_text, of_chat, of_tokens) = (
        client.generate(text("Once upon a time", 6)).await.unwrap().into_inner(),
        client.generate(chat(5)).await.unwrap().into_inner(),
        client.generate(tokens).await.unwrap().into_inner(),
    );
    for (answer, count) in [(&of_text, 6), (&of_chat, 5), (&of_tokens, 4)] {
        let (choice, usage) = (&answer.choices[0], answer.usage.unwrap());
        let finish = choice.finish.as_ref().unwrap();
        assert_eq!((finish.reason(), finish.word.as_str(), finish.stopped_by.clone()), (FinishReason::Length, "length", None::<StoppedBy>));
        assert!(!choice.text.is_empty() && !answer.id.is_empty());
        assert_eq!((answer.model.as_str(), usage.completion_tokens, usage.cached_tokens.is_some()), (MODEL, count, true));
        let placement = answer.placement.as_ref().unwrap();
        assert!(["n0/0", "n1/0"].contains(&placement.replica.as_str()), "{placement:?}");
        assert_eq!((placement.candidates, placement.attempt), (2, 1));
        let explained = fleet.admin().explain(&placement.request_id, 1).await.unwrap();
        assert_eq!(explained[0].scored[explained[0].chosen as usize].replica, placement.replica);
    }
    assert_eq!(of_tokens.usage.unwrap().prompt_tokens, 5);
    assert_eq!(client.generate(text("Once upon a time", 6)).await.unwrap().into_inner().choices[0].text, of_text.choices[0].text);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn the_pieces_of_a_stream_add_up_to_its_answer() {
    let fleet = Fleet::start(Setup::agents(1).engine("--enable-prompt-tokens-details")).await;
    let mut client = client(&fleet).await;
    for mut request in [chat(20), text("Once upon a time", 20)] {
        let sampling = request.sampling.as_mut().unwrap();
        // Engines refuse several choices that would all be the same.
        (sampling.n, sampling.logprobs, sampling.temperature, sampling.seed) = (Some(2), Some(2), Some(1.0), Some(7));
        request.return_token_ids = true;
        let whole = client.generate(request.clone()).await.unwrap().into_inner();
        let answer = generate_streamed(&mut client, request).await.unwrap();
        let started = answer.started.as_ref().unwrap();
        assert_eq!(started.placement.as_ref().unwrap().replica, "n0/0");
        assert!(!started.prompt_token_ids.is_empty());
        assert_eq!((&started.prompt_token_ids, &started.model), (&whole.prompt_token_ids, &whole.model));
        for choice in &whole.choices {
            assert_eq!(answer.text(choice.index), choice.text);
            let deltas = || answer.deltas.iter().filter(|delta| delta.index == choice.index);
            assert!(deltas().count() > 1, "it came in pieces");
            assert_eq!(deltas().flat_map(|delta| delta.token_ids.clone()).collect::<Vec<_>>(), choice.token_ids);
            assert_eq!(deltas().flat_map(|delta| delta.logprobs.clone()).collect::<Vec<_>>(), choice.logprobs);
            assert_eq!((choice.token_ids.len(), choice.logprobs.len(), choice.logprobs[0].alternatives.len()), (20, 20, 2));
        }
        let mut finishes = answer.finishes.clone();
        finishes.sort_unstable_by_key(|(index, _)| *index);
        assert_eq!(finishes, [(0, FinishReason::Length), (1, FinishReason::Length)]);
        assert_eq!(
            answer.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens)),
            whole.usage.map(|usage| (usage.prompt_tokens, 40))
        );
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_tool_call_arrives_whole_and_in_pieces() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let mut client = client(&fleet).await;
    let schema = r#"{"type": "object", "properties": {"city": {"type": "string"}}}"#;
    let request = GenerateRequest {
        tools: vec![Tool { name: "look".into(), parameters_json: schema.into(), ..Tool::default() }],
        tool_choice: Some(ToolChoice { choice: Some(tool_choice::Choice::Function("look".into())) }),
        ..chat(80)
    };
    let whole = client.generate(request.clone()).await.unwrap().into_inner();
    let call = &whole.choices[0].tool_calls[0];
    // For vLLM a call that the request names ends like a text.
    assert_eq!((call.name.as_str(), whole.choices[0].finish.as_ref().unwrap().reason()), ("look", FinishReason::Stop));
    let answer = generate_streamed(&mut client, request).await.unwrap();
    let pieces: Vec<_> = answer.deltas.iter().flat_map(|delta| &delta.tool_calls).collect();
    assert!(pieces.len() > 2 && pieces.iter().all(|piece| piece.index == 0));
    assert_eq!(pieces[0].name, "look");
    assert!(!pieces[0].id.is_empty());
    assert_eq!(pieces.iter().map(|piece| piece.arguments.as_str()).collect::<String>(), call.arguments);
    assert!(call.arguments.contains("\"city\""), "{}", call.arguments);
}

#[tokio::test(start_paused = true)]
async fn embeddings_and_models_match_the_engines() {
    let fleet = Fleet::start(Setup::two_agents().engine_of(1, "--served-model-name simulated other")).await;
    let mut client = client(&fleet).await;
    let input = embed_request::Input::Texts(Texts { texts: vec!["one".into(), "two".into()] });
    let request = EmbedRequest { model: MODEL.into(), input: Some(input), dimensions: Some(8), ..EmbedRequest::default() };
    let answer = client.embed(request).await.unwrap().into_inner();
    let lengths: Vec<_> = answer.embeddings.iter().map(|vector| (vector.index, vector.values.len())).collect();
    assert_eq!(lengths, [(0, 8), (1, 8)]);
    let norm: f32 = answer.embeddings[0].values.iter().map(|value| value * value).sum();
    assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    assert!(answer.usage.unwrap().prompt_tokens > 0 && answer.placement.is_some());

    let models = client.list_models(ListModelsRequest {}).await.unwrap().into_inner().models;
    let listed: Vec<_> = models.iter().map(|model| (model.id.as_str(), model.ready_replicas, model.replicas)).collect();
    assert_eq!(listed, [("other", 1, 1), (MODEL, 2, 2)]);
    assert!(models[0].max_tokens.is_some() && models[0].card_json.starts_with('{'));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_cancels_stops_its_engine_at_once() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let mut client = client(&fleet).await;
    let mut streams = 0;
    let after_stream = fastest(async || {
        streams += 1;
        let stream = endless(&mut client, &format!("stream {streams}")).await;
        gone_after(&fleet, async { drop(stream) }).await
    })
    .await;
    assert!(after_stream < Duration::from_millis(200), "{after_stream:?}");
    let mut wholes = 0;
    let after_whole = fastest(async || {
        wholes += 1;
        let (mut client, request) = (client.clone(), text(&format!("whole {wholes}"), 10_000));
        let asking = tokio::spawn(async move { client.generate(request).await });
        until("it runs", async || if running(&fleet, "n0/0").await > 0.0 { Ok(()) } else { Err("it does not run yet".into()) }).await;
        gone_after(&fleet, async { asking.abort() }).await
    })
    .await;
    assert!(after_whole < Duration::from_millis(200), "{after_whole:?}");
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_passed_deadline_ends_the_call_and_its_work() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    // A generated client would watch the deadline itself; this one only sends it.
    let raw = Raw::connect(&fleet).await;
    for (method, beginning) in [("GenerateStream", true), ("Generate", false)] {
        let request = text(&format!("too long for {method}"), 10_000);
        let began = Instant::now();
        let answer = raw.call(&format!("/hostler.inference.v1.Inference/{method}"), &request, &[("grpc-timeout", "300m")]).await;
        let took = began.elapsed();
        assert_eq!((answer.code(), answer.bytes > 0), (Code::DeadlineExceeded, beginning), "{method} {answer:?}");
        assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(5), "{method} took {took:?}");
        let gone = gone_after(&fleet, async {}).await;
        assert!(gone < Duration::from_secs(2), "{gone:?}");
    }
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn errors_are_statuses_with_details() {
    let fleet = Fleet::start(Setup::agents(1).router(|config| {
        config.max_in_flight = 1;
        config.max_body_bytes = 100_000;
    }))
    .await;
    let mut client = client(&fleet).await;
    let mut refused = async |request: GenerateRequest| {
        let whole = client.generate(request.clone()).await.unwrap_err();
        let streamed = client.generate_stream(request).await.unwrap_err();
        assert_eq!((whole.code(), whole.message()), (streamed.code(), streamed.message()));
        let info = whole.get_error_details().error_info().unwrap().clone();
        assert_eq!(info.domain, "hostler");
        (whole.code(), info.reason, whole)
    };
    let (code, reason, status) = refused(GenerateRequest { model: "nobody".into(), ..text("x", 1) }).await;
    assert_eq!((code, reason.as_str()), (Code::NotFound, "MODEL_NOT_FOUND"));
    assert_eq!(status.get_error_details().error_info().unwrap().metadata["models"], MODEL);

    let mut hot = text("x", 1);
    hot.sampling.as_mut().unwrap().temperature = Some(-1.0);
    let (code, reason, status) = refused(hot).await;
    assert_eq!((code, reason.as_str()), (Code::InvalidArgument, "ENGINE_REFUSED"));
    assert_eq!(status.get_error_details().bad_request().unwrap().field_violations[0].field, "temperature");

    let (code, reason, _) = refused(GenerateRequest::default()).await;
    assert_eq!((code, reason.as_str()), (Code::InvalidArgument, "INVALID_FIELD"));
    let (code, reason, _) = refused(text(&"x".repeat(100_001), 1)).await;
    assert_eq!((code, reason.as_str()), (Code::ResourceExhausted, "MESSAGE_TOO_LARGE"));

    let running = endless(&mut self::client(&fleet).await, "fills the router").await;
    let (code, reason, status) = refused(text("x", 1)).await;
    assert_eq!((code, reason.as_str()), (Code::ResourceExhausted, "LIMITED"));
    assert_eq!(status.get_error_details().retry_info().unwrap().retry_delay, Some(Duration::from_secs(1)));
    drop(running);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_ends_its_streams_with_a_status() {
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.resume_streams = false)).await;
    let mut client = client(&fleet).await;
    let mut stream = endless(&mut client, "a last story").await;
    fleet.kill("n0/0").await;
    let status = loop {
        match soon("the end of a stream", stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a broken answer ends like a whole one"),
            Err(status) => break status,
        }
    };
    assert!(matches!(status.code(), Code::Unavailable | Code::Internal), "{status:?}");
    assert!(status.get_error_details().error_info().is_some());
}

#[tokio::test(start_paused = true)]
async fn two_hundred_streams_share_one_connection() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 20")).await;
    let client = client(&fleet).await;
    let streams = (0..200).map(|index| {
        let mut client = client.clone();
        async move {
            let answer = generate_streamed(&mut client, text(&format!("story {index}"), 30)).await.unwrap();
            assert_eq!((answer.usage.unwrap().completion_tokens, &answer.finishes[..]), (30, &[(0, FinishReason::Length)][..]));
            answer.started.unwrap().placement.unwrap().replica
        }
    });
    let mut replicas = join_all(streams).await;
    replicas.sort();
    replicas.dedup();
    assert_eq!(replicas, ["n0/0", "n1/0"], "both took some");
    fleet.until_idle().await;
}
