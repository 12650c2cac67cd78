//! Simulated engines in this process, and the pace of a paused clock.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hostler_agent::bridge::{AttachTarget, EngineKey};
use hostler_agent::keeper::{EngineLaunch, InProcessEngines};
use hostler_sim::EngineArgs;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(super) fn in_process() -> Arc<InProcessEngines> {
    InProcessEngines::new(run)
}

fn run(launch: EngineLaunch, terminate: CancellationToken) -> BoxFuture<'static, bool> {
    if launch.arguments.first().is_some_and(|first| first == "bridge") {
        return attach(launch, terminate).boxed();
    }
    async move {
        let is_set = |name: &str| launch.set.iter().any(|(set, value)| set == name && value != "0");
        // Skip `sim engine`.
        let flags: Vec<_> = launch.arguments.iter().skip(2).map(|flag| flag.to_string_lossy()).collect();
        let mut args = EngineArgs::from_flags(&flags);
        args.sim_dev_mode |= is_set("VLLM_SERVER_DEV_MODE");
        args.sim_runtime_lora |= is_set("VLLM_ALLOW_RUNTIME_LORA_UPDATING");
        args.sim_rust_front_end |= is_set("VLLM_USE_RUST_FRONTEND");
        args.sim_store_responses |= is_set("VLLM_ENABLE_RESPONSES_API_STORE");
        match hostler_sim::serve(args, terminate.cancelled()).await {
            Ok(()) => true,
            Err(error) => {
                tracing::info!(%error, "an engine ends");
                false
            }
        }
    }
    .boxed()
}

/// A bridge, as `hostler bridge TARGET --uds SOCKET --key-file FILE`.
async fn attach(launch: EngineLaunch, terminate: CancellationToken) -> bool {
    let [_, target, _, socket, more @ ..] = &launch.arguments[..] else { return false };
    let key = more.get(1).map(|file| EngineKey::read(Path::new(file)).expect("the agent has checked it"));
    let target = AttachTarget::parse(&target.to_string_lossy()).expect("the agent has checked it");
    hostler_agent::bridge::run(target, key, Path::new(socket), terminate).await.is_ok()
}

/// Step of a paused clock while all tasks wait.
///
/// A task may see another one's write to a socket only after such a step, so this is the latency of
/// a hop.
const STEP: Duration = Duration::from_millis(1);

/// Keeps a paused clock at this pace, for as long as it is polled.
///
/// Tokio moves such a clock to the next timer as soon as every task waits, even if one waits for a
/// socket that has just been written to. With this pace the next timer is never far.
pub(super) async fn pace_paused_clock() {
    if is_clock_paused() {
        loop {
            tokio::time::sleep(STEP).await;
        }
    }
}

fn is_clock_paused() -> bool {
    let before = Instant::now();
    #[allow(clippy::disallowed_methods, reason = "shows whether the clock stands still")]
    std::thread::sleep(STEP);
    Instant::now() == before
}
