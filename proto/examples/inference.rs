//! Client that asks a router over gRPC.
//!
//! `cargo run --package hostler-proto --example inference -- http://127.0.0.1:8000 "Tell me about
//! engines."`

#![allow(clippy::print_stdout, reason = "it is what an example is for")]

use std::io::Write;
use std::time::Duration;

use hostler_proto::inference::v1::generate_event::Event;
use hostler_proto::inference::v1::generate_request::Prompt;
use hostler_proto::inference::v1::inference_client::InferenceClient;
use hostler_proto::inference::v1::{Chat, ContentPart, GenerateRequest, Message, Sampling, content_part};
use tonic::transport::Endpoint;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8000".into());
    let question = arguments.next().unwrap_or_else(|| "Tell me about engines.".into());

    let mut client = InferenceClient::new(Endpoint::from_shared(address)?.connect().await?);
    let content = vec![ContentPart { part: Some(content_part::Part::Text(question)) }];
    let message = Message { role: "user".into(), content, ..Message::default() };
    let mut request = tonic::Request::new(GenerateRequest {
        prompt: Some(Prompt::Chat(Chat { messages: vec![message], ..Chat::default() })),
        sampling: Some(Sampling { max_tokens: Some(64), ..Sampling::default() }),
        ..GenerateRequest::default()
    });
    request.set_timeout(Duration::from_secs(60));
    // If the router wants a key:
    // request.metadata_mut().insert("authorization", "Bearer KEY".parse()?);

    let mut events = client.generate_stream(request).await?.into_inner();
    // Dropping `events` before its end stops the generation in the engine.
    while let Some(event) = events.message().await? {
        match event.event {
            Some(Event::Started(started)) => println!("{}", started.placement.unwrap_or_default().replica),
            Some(Event::Delta(delta)) => print!("{}", delta.text),
            Some(Event::Finish(finish)) => println!("\n{}", finish.word),
            Some(Event::Usage(usage)) => println!("{} + {} tokens", usage.prompt_tokens, usage.completion_tokens),
            None => {}
        }
        std::io::stdout().flush()?;
    }
    Ok(())
}
