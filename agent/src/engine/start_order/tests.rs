use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;

const START_LIMIT: Duration = Duration::from_secs(1800);

/// Replicas on one GPU each.
fn apart(replicas: usize) -> Arc<StartOrder> {
    start_order((0..replicas).map(|gpu| vec![format!("GPU-{gpu}")]).collect(), true)
}

fn start_order(devices: Vec<Vec<String>>, warm_first: bool) -> Arc<StartOrder> {
    Arc::new(StartOrder::new(devices, warm_first, START_LIMIT))
}

fn on(gpus: &[&str]) -> Vec<String> {
    gpus.iter().map(|gpu| (*gpu).to_owned()).collect()
}

/// Requests a start permit for each replica in order; each task waits for its permit or has it.
async fn ask(order: &Arc<StartOrder>, replicas: std::ops::Range<u32>) -> Vec<JoinHandle<StartPermit>> {
    let mut permits = Vec::new();
    for index in replicas {
        let order = Arc::clone(order);
        permits.push(tokio::spawn(async move { order.acquire(index).await }));
        run_tasks().await;
    }
    permits
}

/// Lets every task run as far as it gets without the clock.
async fn run_tasks() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn begun(permits: &[JoinHandle<StartPermit>]) -> Vec<bool> {
    permits.iter().map(JoinHandle::is_finished).collect()
}

#[tokio::test(start_paused = true)]
async fn the_first_engine_warms_the_compile_cache_before_the_others() {
    let order = apart(3);
    let mut permits = ask(&order, 0..3).await;
    assert_eq!(begun(&permits), [true, false, false]);
    assert_eq!(order.blocked_by(1).unwrap(), "waits until replica 0 of this node has warmed the compile cache");
    assert_eq!(order.blocked_by(0), None);
    let first = permits.remove(0).await.unwrap();
    first.mark_cache_warm();
    run_tasks().await;
    assert_eq!(begun(&permits), [true, true]);
    drop(first);
    // A later start of any replica waits for nobody, because the cache stays warm.
    assert_eq!(begun(&ask(&order, 0..1).await), [true]);
}

#[tokio::test(start_paused = true)]
async fn a_ready_engine_has_warmed_the_compile_cache() {
    let order = apart(2);
    let mut permits = ask(&order, 0..2).await;
    permits.remove(0).await.unwrap().finish();
    run_tasks().await;
    assert_eq!(begun(&permits), [true]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_warm_up_lets_the_next_engine_try() {
    let order = apart(3);
    let mut permits = ask(&order, 0..3).await;
    drop(permits.remove(0).await.unwrap());
    run_tasks().await;
    assert_eq!(begun(&permits), [true, false]);
    // The failed replica queues behind those that have waited.
    let mut again = ask(&order, 0..1).await;
    assert_eq!(begun(&again), [false]);
    drop(permits.remove(0).await.unwrap());
    run_tasks().await;
    assert_eq!((begun(&permits), begun(&again)), (vec![true], vec![false]));
    permits.remove(0).await.unwrap().finish();
    run_tasks().await;
    assert!(again.remove(0).is_finished());
}

#[tokio::test(start_paused = true)]
async fn engines_that_share_a_gpu_start_one_after_another() {
    let order = start_order(vec![on(&["a"]), on(&["a"]), on(&["b", "c"]), on(&["c"])], false);
    let mut permits = ask(&order, 0..4).await;
    assert_eq!(begun(&permits), [true, false, true, false]);
    assert_eq!(order.blocked_by(1).unwrap(), "waits for replica 0, which starts on the same GPU");
    assert_eq!(order.blocked_by(3).unwrap(), "waits for replica 2, which starts on the same GPU");
    let third = permits.remove(2).await.unwrap();
    // No warm-up was requested, so `mark_cache_warm` frees nobody's GPU.
    third.mark_cache_warm();
    run_tasks().await;
    assert_eq!(begun(&permits), [true, false, false]);
    drop(third);
    drop(permits.remove(0).await.unwrap());
    run_tasks().await;
    assert_eq!(begun(&permits), [true, true]);
}

#[tokio::test(start_paused = true)]
async fn the_engine_that_waited_longest_gets_the_gpu_first() {
    let order = start_order(vec![on(&["a"]), on(&["a", "b"]), on(&["b"])], false);
    let mut permits = ask(&order, 0..3).await;
    // The last replica could start at once, but would then hold up the one before it.
    assert_eq!(begun(&permits), [true, false, false]);
    drop(permits.remove(0).await.unwrap());
    run_tasks().await;
    assert_eq!(begun(&permits), [true, false]);
}

#[tokio::test(start_paused = true)]
async fn engines_that_share_nothing_start_at_once() {
    let order = Arc::new(StartOrder::unordered());
    assert_eq!(begun(&ask(&order, 0..8).await), [true; 8]);
}

#[tokio::test(start_paused = true)]
async fn an_engine_dropped_while_waiting_leaves_the_queue() {
    let order = apart(3);
    let mut permits = ask(&order, 0..3).await;
    permits[1].abort();
    run_tasks().await;
    drop(permits.remove(0).await.unwrap());
    run_tasks().await;
    assert_eq!(order.blocked_by(1), None);
    assert!(permits[1].is_finished());
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_a_warm_up_beyond_five_minutes() {
    let order = apart(2);
    let permits = ask(&order, 0..2).await;
    sleep(MAX_WARM_WAIT.checked_sub(Duration::from_secs(1)).unwrap()).await;
    assert_eq!(begun(&permits), [true, false]);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(begun(&permits), [true, true]);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_a_gpu_beyond_the_longest_start() {
    let order = start_order(vec![on(&["a"]), on(&["a"]), on(&["a"])], false);
    let permits = ask(&order, 0..3).await;
    sleep(START_LIMIT + Duration::from_secs(1)).await;
    assert_eq!(begun(&permits), [true, true, false]);
    sleep(START_LIMIT + Duration::from_secs(1)).await;
    assert_eq!(begun(&permits), [true, true, true]);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_warm_up_that_fails_late_changes_nothing() {
    let order = apart(2);
    let mut permits = ask(&order, 0..1).await;
    sleep(MAX_WARM_WAIT + Duration::from_secs(1)).await;
    let mut late = ask(&order, 1..2).await;
    assert_eq!(begun(&late), [true]);
    drop(permits.remove(0).await.unwrap());
    drop(late.remove(0).await.unwrap());
    assert_eq!(begun(&ask(&order, 0..2).await), [true, true]);
}

#[tokio::test(start_paused = true)]
async fn only_several_compiling_vllm_engines_warm_up_alone() {
    let vllm = EngineProgram::Vllm { program: "vllm".into(), container: None };
    let simulated = EngineProgram::Simulated { program: "hostler".into() };
    let line = |arguments: &[&str]| CommandLine {
        container: Vec::new(),
        program: "vllm".into(),
        arguments: arguments.iter().map(OsString::from).collect(),
        set: Vec::new(),
        unset: Vec::new(),
        withheld_routes: &[],
    };
    let replicas = |count: u32| (0..count).map(|index| ReplicaPlan { index, gpus: Vec::new(), is_standby: false }).collect::<Vec<_>>();
    let first_alone = async |engine, count, arguments: &[&str]| {
        let order = Arc::new(StartOrder::for_replicas(engine, &replicas(count), Some(&line(arguments)), START_LIMIT));
        begun(&ask(&order, 0..2).await) == [true, false]
    };
    assert!(first_alone(&vllm, 2, &["serve", "/models/tiny"]).await);
    assert!(!first_alone(&vllm, 2, &["serve", "/models/tiny", "--enforce_eager"]).await);
    assert!(!first_alone(&simulated, 2, &[]).await);
    assert!(!first_alone(&vllm, 1, &["serve", "/models/tiny"]).await);
}
