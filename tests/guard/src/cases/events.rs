//! Events at the router: batches from the agent's lanes in, chunks to the clients out.

use super::clients::{Client, EVENT, chat, chunk};
use super::scene::{RouterFixture, begin, piece};
use crate::counted::drive;

/// Streams that an engine steps together.
pub(crate) const STREAMS: u32 = 256;

/// Steps that are counted.
pub(crate) const STEPS: u32 = 20;

/// Events that are counted of a stream that is alone.
pub(crate) const ALONE: u32 = 500;

/// Steps before that.
const WARM: u32 = 5;

/// Counts `steps` of as many streams.
pub(crate) fn streams(streams: u32, steps: u32) -> anyhow::Result<()> {
    drive(async move {
        let mut scene = RouterFixture::start(1).await?;
        let mut clients = Client::connect(scene.edge, streams).await?;
        for client in &mut clients {
            client.send(&chat("Tell me about engines.", true)).await?;
        }
        let serving = scene.take(streams).await?;
        serving.iter().for_each(|serving| begin(serving, "text/event-stream; charset=utf-8", None));
        serving.iter().for_each(|serving| piece(serving, EVENT));
        let chunk = chunk(EVENT);
        for client in &mut clients {
            client.head().await?;
            client.expect(&chunk).await?;
        }
        for step in 0..WARM + steps {
            if step == WARM {
                scene.router.begin().await;
            }
            let events = async || {
                serving.iter().for_each(|serving| piece(serving, EVENT));
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
