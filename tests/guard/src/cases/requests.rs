//! Requests at the router: bytes of HTTP in, a frame to the agent out; the agent's frames in, an
//! answer out.

use super::clients::{ANSWER, Client, chat};
use super::scene::{RouterFixture, begin, piece, traces};
use crate::counted::drive;

/// Clients that send at the same time.
pub(crate) const AT_ONCE: u32 = 16;

/// Counted requests of each client.
pub(crate) const ROUNDS: u32 = 40;

/// Counted requests with a long prompt, one after another.
pub(crate) const LONG: u32 = 20;

/// Requests of each client before counting.
const WARM: u32 = 10;

pub(crate) fn tiny(replicas: u32) -> anyhow::Result<()> {
    requests(RouterFixture::start(replicas, None), AT_ONCE, ROUNDS, "Hello")
}

/// Counts requests of which one in a hundred has a trace.
pub(crate) fn traced() -> anyhow::Result<()> {
    requests(RouterFixture::start(8, Some(traces(0.01))), AT_ONCE, ROUNDS, "Hello")
}

/// Counts requests with 100 kB of prompt.
pub(crate) fn long() -> anyhow::Result<()> {
    requests(RouterFixture::start(8, None), 1, LONG, &"Engines turn prompts into tokens. ".repeat(3_000))
}

fn requests(start: impl Future<Output = anyhow::Result<RouterFixture>>, at_once: u32, rounds: u32, prompt: &str) -> anyhow::Result<()> {
    drive(async move {
        let mut scene = start.await?;
        let mut clients = Client::connect(scene.edge, at_once).await?;
        let request = chat(prompt, r#""stream":false"#);
        for round in 0..WARM + rounds {
            if round == WARM {
                scene.router.begin().await;
            }
            let sending = async || {
                for client in &mut clients {
                    client.send(&request).await?;
                }
                Ok(())
            };
            scene.at_once(sending).await?;
            let serving = scene.take(at_once).await?;
            let answering = async || {
                for serving in serving {
                    begin(&serving, "application/json", Some(ANSWER.len()));
                    piece(&serving, ANSWER);
                    serving.end(&Ok(()));
                }
                Ok(())
            };
            scene.at_once(answering).await?;
            for client in &mut clients {
                client.answer(ANSWER).await?;
            }
        }
        scene.router.end().await;
        Ok(())
    })
}
