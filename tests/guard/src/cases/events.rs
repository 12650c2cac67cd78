//! Events at the router: batches from the agent's lanes in, chunks to the clients out.

use super::clients::{Client, EVENT, EVENT_WITH_TOKEN, FIRST_WITH_TOKENS, chat, chunk};
use super::scene::{RouterFixture, begin, piece};
use crate::counted::drive;

/// Streams that an engine steps together.
pub(crate) const STREAMS: u32 = 256;

/// Number of counted steps.
pub(crate) const STEPS: u32 = 20;

/// Counted events of a single stream.
pub(crate) const ALONE: u32 = 500;

/// Steps before counting.
const WARM: u32 = 5;

/// Kind of the counted streams.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamKind {
    fields: &'static str,
    first: &'static str,
    event: &'static str,
}

/// A stop string and sampling without a seed: no engine is asked for its tokens, and nothing is
/// remembered.
pub(crate) const NOT_RESUMED: StreamKind = StreamKind { fields: r#""stream":true,"stop":"never said""#, first: EVENT, event: EVENT };

/// A seed at a temperature: the tokens are remembered.
pub(crate) const REPLAYED: StreamKind = StreamKind { fields: r#""stream":true,"seed":7"#, first: EVENT, event: EVENT };

/// The engine reports tokens, which are remembered and removed.
pub(crate) const RESUMED: StreamKind = StreamKind { fields: r#""stream":true"#, first: FIRST_WITH_TOKENS, event: EVENT_WITH_TOKEN };

/// Bytes that a client gets for an event with the tokens in `list`.
fn seen_by_client(event: &str, list: &str) -> String {
    chunk(&event.replace(list, "null"))
}

/// Counts `steps` of as many streams.
pub(crate) fn streams(kind: StreamKind, streams: u32, steps: u32) -> anyhow::Result<()> {
    drive(async move {
        let mut scene = RouterFixture::start(1, None).await?;
        let mut clients = Client::connect(scene.edge, streams).await?;
        for client in &mut clients {
            client.send(&chat("Tell me about engines.", kind.fields)).await?;
        }
        let serving = scene.take(streams).await?;
        serving.iter().for_each(|serving| begin(serving, "text/event-stream; charset=utf-8", None));
        serving.iter().for_each(|serving| piece(serving, kind.first));
        let first = seen_by_client(kind.first, "[151644,872,198]");
        let chunk = seen_by_client(kind.event, "[3950]");
        for client in &mut clients {
            client.head().await?;
            client.expect(&first).await?;
        }
        for step in 0..WARM + steps {
            if step == WARM {
                scene.router.begin().await;
            }
            let events = async || {
                serving.iter().for_each(|serving| piece(serving, kind.event));
                Ok(())
            };
            scene.at_once(events).await?;
            for client in &mut clients {
                client.expect(&chunk).await?;
            }
        }
        scene.router.end().await;
        Ok(())
    })
}
