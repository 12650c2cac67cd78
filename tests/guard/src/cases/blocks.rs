//! Events about the KV blocks of long prompts: at the agent from the engine's message to the report
//! for a router, at the router from that report to the cache index.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use hostler_proto::agent::v1 as wire;
use hostler_scale::Attachment;
use hostler_sim::kv_events::Event;
use tokio::time::{sleep, timeout};

use super::agent::AgentFixture;
use super::scene::{RouterFixture, admin_page};
use crate::counted::drive;
use crate::fake_engine::{REMOVE, STORE};

/// Number of counted events.
pub(crate) const PROMPTS: u32 = 20;

/// Events before counting.
const WARM: u32 = 5;

/// Whole blocks of a prompt of 100 kB.
const BLOCKS: usize = 1_560;

const BLOCK_TOKENS: usize = 16;

/// Tokens of a usual vocabulary.
const VOCABULARY: u32 = 151_643;

/// Life of a replica without an engine.
const EPOCH: u64 = 1;

/// Time limit for an event to arrive, under valgrind on a busy machine.
const ARRIVAL: Duration = Duration::from_secs(30);

/// Kind of the counted events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    Stored,
    Removed,
}

/// Hashes of a prompt's blocks, equal in each run. Prompts have nothing in common.
fn hashes(prompt: u32) -> Vec<u64> {
    let mut random = fastrand::Rng::with_seed(prompt.into());
    (0..BLOCKS).map(|_| random.u64(..)).collect()
}

/// Event of an engine that has computed the prompt of this number.
pub(crate) fn stored_blocks(prompt: u32) -> Event {
    let mut random = fastrand::Rng::with_seed(prompt.into());
    let tokens = (0..BLOCKS * BLOCK_TOKENS).map(|_| random.u32(..VOCABULARY)).collect();
    Event::stored(hashes(prompt), None, tokens, vec![None; BLOCKS])
}

/// Events of an engine that uses the blocks for something else.
pub(crate) fn removed_blocks(prompt: u32) -> Vec<Event> {
    hashes(prompt).into_iter().map(Event::removed).collect()
}

pub(crate) fn at_agent(counted: Counted) -> anyhow::Result<()> {
    drive(async move {
        let mut scene = AgentFixture::start(true).await?;
        for prompt in 0..WARM + PROMPTS {
            if counted == Counted::Stored && prompt == WARM {
                scene.agent.begin().await;
            }
            scene.order(STORE, prompt).await?;
            until_known(scene.admin, (prompt as usize + 1) * BLOCKS).await?;
        }
        if counted == Counted::Removed {
            for prompt in 0..WARM + PROMPTS {
                if prompt == WARM {
                    scene.agent.begin().await;
                }
                scene.order(REMOVE, prompt).await?;
                until_known(scene.admin, ((WARM + PROMPTS - prompt) as usize - 1) * BLOCKS).await?;
            }
        }
        scene.end().await;
        Ok(())
    })
}

/// Waits until the router's index has so many blocks.
async fn until_known(admin: SocketAddr, blocks: usize) -> anyhow::Result<()> {
    let arrival = async {
        while known_blocks(admin).await? != Some(blocks) {
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    };
    timeout(ARRIVAL, arrival).await.with_context(|| format!("the router's index does not come to {blocks} blocks"))?
}

/// Blocks of the only replica in the router's index.
async fn known_blocks(admin: SocketAddr) -> anyhow::Result<Option<usize>> {
    let page = admin_page(admin, "/metrics").await?;
    let line = page.lines().find(|line| line.starts_with("hostler_replica_cached_blocks{"));
    Ok(line.and_then(|line| line.rsplit(' ').next()?.parse().ok()))
}

pub(crate) fn at_router(counted: Counted) -> anyhow::Result<()> {
    drive(async move {
        let mut scene = RouterFixture::start(1, None).await?;
        let mut known = wire::CacheReport { epoch: EPOCH, snapshot: true, ..wire::CacheReport::default() };
        for prompt in 0..WARM + PROMPTS {
            if counted == Counted::Stored && prompt == WARM {
                scene.router.begin().await;
            }
            known.stored = hashes(prompt);
            known.count += BLOCKS as u64;
            report(&mut scene.attached[0], &mut known).await?;
        }
        for prompt in (0..WARM + PROMPTS).filter(|_| counted == Counted::Removed) {
            if prompt == WARM {
                scene.router.begin().await;
            }
            known.removed = hashes(prompt);
            known.count -= BLOCKS as u64;
            report(&mut scene.attached[0], &mut known).await?;
        }
        scene.router.end().await;
        let blocks = known_blocks(scene.admin).await?;
        ensure!(blocks == usize::try_from(known.count).ok(), "the index has {blocks:?} blocks of {}", known.count);
        Ok(())
    })
}

/// Sends a report, whose digest is set here, and waits until it is in the index.
///
/// A report of an unknown life comes after it. The router asks for the whole cache of that life
/// once it has applied all reports before.
async fn report(attached: &mut Attachment, known: &mut wire::CacheReport) -> anyhow::Result<()> {
    known.digest = known.stored.iter().chain(&known.removed).fold(known.digest, |digest, key| digest ^ key);
    attached.report_cache(known.clone()).await?;
    (known.snapshot, known.stored, known.removed) = (false, Vec::new(), Vec::new());
    attached.report_cache(wire::CacheReport { epoch: EPOCH + 1, ..wire::CacheReport::default() }).await?;
    timeout(ARRIVAL, attached.directive()).await.context("the router asks for no cache")??;
    Ok(())
}
