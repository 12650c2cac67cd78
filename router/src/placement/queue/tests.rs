use parking_lot::Mutex as Log;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;
use crate::fleet::tests::{LEASE, ReplicaChange, announce, attach, ready, report, state};
use crate::fleet::{FleetUpdate, InFlight, InFlightCost, Phase, ReplicaStatus};
use crate::placement::prompt::tests::{exact, for_model, text};
use crate::placement::tests::{FILES, Fixture as Placement};

/// A request that is never overdue.
const ONE_UNDUE: InFlightCost =
    InFlightCost { sequences: 1, prompt_tokens: 0, uncached_tokens: 0, loaded_tokens: 0, read_tokens: 0, first_byte_due: f64::MAX };

/// A fleet of one replica, and its queue.
struct Fixture {
    placed: Placement,
    queue: RequestQueue,
    shutdown: Shutdown,
    /// The requests that had a turn, in order.
    log: Arc<Log<Vec<&'static str>>>,
}

impl Fixture {
    async fn start(most: usize, longest: Duration) -> Self {
        Self::on(Placement::approximate(1).await, most, longest)
    }

    fn on(placed: Placement, most: usize, max_wait: Duration) -> Self {
        let bounds = QueueLimits { max_requests: most, max_bytes: 1 << 20, max_wait };
        let shutdown = Shutdown::new();
        let queue = RequestQueue::start(placed.placer.clone(), bounds, &BackgroundTasks::default(), shutdown.clone());
        Self { placed, queue, shutdown, log: Arc::default() }
    }

    /// A request that takes all the room that a replica has.
    fn fill(&self, replica: usize) -> InFlight {
        self.placed.fleet.view().replicas[replica]
            .local_load
            .start_request(InFlightCost { prompt_tokens: 50_000, uncached_tokens: 50_000, ..ONE_UNDUE }, None)
    }

    /// Waits for a turn, and gives it up at once.
    fn wait(&self, name: &'static str, priority: i32, tokens: usize) -> JoinHandle<Result<(), Overload>> {
        let (queue, log, placer) = (self.queue.clone(), self.log.clone(), self.placed.placer.clone());
        tokio::spawn(async move {
            let turn = turn(&queue, &placer, priority, tokens).await?;
            log.lock().push(name);
            drop(turn);
            Ok(())
        })
    }

    fn log(&self) -> Vec<&'static str> {
        self.log.lock().clone()
    }
}

fn share(tenant: u64, bytes: u64) -> QueueShare {
    QueueShare { tenant, weight: 1.0, bytes }
}

/// A tenant's request for the chosen replica.
fn turn_factors(tenant: u64, chosen: &ChosenReplica) -> TurnFactors {
    TurnFactors { priority: 0, tenant, weight: 1.0, uncached_tokens: chosen.uncached_tokens(), output_tokens: 0, queued_at: 0.0 }
}

/// Queues a prompt of so many tokens.
async fn turn(
    queue: &RequestQueue,
    placer: &Placer,
    priority: i32,
    tokens: usize,
) -> Result<(Option<ChosenReplica>, DispatchTurn), Overload> {
    let prompt = Arc::new(text(&"a".repeat(4 * tokens)));
    let chosen = placer.choose(&prompt, &[], Instant::now()).expect("there is a replica");
    let waiting = TurnFactors { priority, ..turn_factors(0, &chosen) };
    queue.wait_for_turn((&prompt, &[]), waiting, queue.take_slot(share(0, 4 * tokens as u64))?, chosen.wait_estimate()).await
}

const LONG: Duration = Duration::from_secs(3600);

/// Lets every task run as far as it can. The clock is paused.
async fn let_tasks_run() {
    sleep(Duration::from_millis(50)).await;
}

#[tokio::test(start_paused = true)]
async fn no_request_is_queued_while_a_replica_has_room() {
    let fixture = Fixture::start(8, LONG).await;
    assert_eq!(fixture.wait("at once", 0, 100).await.unwrap(), Ok(()));
    assert!(fixture.queue.waiting_count() == 0 && !fixture.queue.has_waiting(Some("m")));
}

#[tokio::test(start_paused = true)]
async fn a_request_avoids_a_leaving_node_until_it_is_last() {
    let fixture = Fixture::start(8, LONG).await;
    let lane = fixture.placed.leave_in(2).await;
    let full = fixture.fill(0);
    assert_eq!(&*fixture.placed.fleet.view().replicas[0].id, "later/0");
    drop(fixture.wait("first", 0, 100));
    let_tasks_run().await;
    assert_eq!((fixture.queue.waiting_count(), fixture.log().len()), (1, 0), "a request that waits is better than one that is cut");
    drop(full);
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["first"]);
    let _full = fixture.fill(0);
    drop(fixture.wait("second", 0, 100));
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["first"]);
    let draining = ReplicaChange { state: Some(state(Phase::Draining, "m")), ..ready(0) };
    report(&fixture.placed.fleet, 2, false, vec![draining]).await;
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["first", "second"]);
    drop(lane);
}

#[tokio::test(start_paused = true)]
async fn prompts_for_a_busy_replica_wait_for_a_prefill_window() {
    let every = Duration::from_millis(400);
    let fixture = Fixture::on(Placement::with_prefill_windows(1, every).await, 8, LONG);
    let local_load = fixture.placed.fleet.view().replicas[0].local_load.clone();
    let streams: Vec<InFlight> =
        (0..100).map(|_| local_load.start_request(InFlightCost { sequences: 1, ..InFlightCost::default() }, None)).collect();
    let begun = Instant::now();
    let mut turns = Vec::new();
    for _ in 0..4 {
        // The requests come at different points of the first two intervals.
        sleep(Duration::from_millis(130)).await;
        let (queue, placer) = (fixture.queue.clone(), fixture.placed.placer.clone());
        turns.push(tokio::spawn(async move {
            let prompt = Arc::new(text("hello"));
            let chosen = placer.choose(&prompt, &[], Instant::now()).expect("there is a replica");
            if !chosen.has_room() {
                let slot = queue.take_slot(share(0, 5)).unwrap();
                queue.wait_for_turn((&prompt, &[]), turn_factors(0, &chosen), slot, chosen.wait_estimate()).await.unwrap();
            }
            begun.elapsed()
        }));
    }
    let mut windows = Vec::new();
    for turn in turns {
        let at = turn.await.unwrap();
        // Turns within a window's length of each other are in the same window.
        if windows.iter().all(|window: &Duration| at.abs_diff(*window) > every / 8) {
            windows.push(at);
        }
    }
    assert!(windows.len() <= 2, "{windows:?}");
    assert!(begun.elapsed() < 3 * every, "nobody waits for more than an interval");
    drop(streams);
    let chosen = fixture.placed.choose(&text("hello"));
    assert!(chosen.has_room(), "a replica that is not busy takes them at any time");
}

#[tokio::test(start_paused = true)]
async fn the_lowest_priority_goes_first_and_then_the_shortest_prompt() {
    let fixture = Fixture::start(8, LONG).await;
    let full = fixture.fill(0);
    for (name, priority, uncached) in [("long", 0, 4000), ("last", 5, 5000), ("short", 0, 40), ("first", -1, 9000)] {
        drop(fixture.wait(name, priority, uncached));
        let_tasks_run().await;
    }
    assert_eq!((fixture.queue.waiting_count(), fixture.log().len()), (4, 0));
    assert!(fixture.queue.has_waiting(Some("m")));
    drop(full);
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["first", "short", "long", "last"]);
    assert!(fixture.queue.waiting_count() == 0 && !fixture.queue.has_waiting(Some("m")));
}

#[tokio::test(start_paused = true)]
async fn the_next_request_sees_what_its_predecessor_takes() {
    let fixture = Fixture::start(8, LONG).await;
    let full = fixture.fill(0);
    let (queue, placer) = (fixture.queue.clone(), fixture.placed.placer.clone());
    let taking = tokio::spawn(async move {
        let (_, turn) = turn(&queue, &placer, 0, 10).await.unwrap();
        let taken = placer.fleet.view().replicas[0]
            .local_load
            .start_request(InFlightCost { prompt_tokens: 50_000, uncached_tokens: 50_000, ..ONE_UNDUE }, None);
        drop(turn);
        taken
    });
    let_tasks_run().await;
    drop(fixture.wait("next", 0, 20));
    let_tasks_run().await;
    drop(full);
    let taken = taking.await.unwrap();
    let_tasks_run().await;
    assert_eq!((fixture.log().len(), fixture.queue.waiting_count()), (0, 1), "there was room for one");
    drop(taken);
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["next"]);
}

#[tokio::test(start_paused = true)]
async fn an_unused_turn_holds_up_others_only_briefly() {
    let fixture = Fixture::start(8, LONG).await;
    let full = fixture.fill(0);
    let (queue, placer) = (fixture.queue.clone(), fixture.placed.placer.clone());
    let idle = tokio::spawn(async move { turn(&queue, &placer, -1, 10).await });
    let_tasks_run().await;
    drop(fixture.wait("next", 0, 20));
    let_tasks_run().await;
    drop(full);
    let kept = idle.await.unwrap().unwrap();
    assert_eq!(fixture.log().len(), 0);
    sleep(TURN_TIMEOUT * 2).await;
    assert_eq!(fixture.log(), ["next"]);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_further_requests() {
    let fixture = Fixture::start(2, LONG).await;
    let full = fixture.fill(0);
    let queued = [fixture.wait("a", 0, 10), fixture.wait("b", 0, 10)];
    let_tasks_run().await;
    assert_eq!(fixture.wait("c", -9, 1).await.unwrap(), Err(Overload::Full(QueueFull::Requests)), "not even the most urgent");
    assert_eq!(fixture.queue.waiting_count(), 2);
    drop(full);
    for queued in queued {
        assert_eq!(queued.await.unwrap(), Ok(()));
    }
    assert_eq!(fixture.wait("c", 0, 1).await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_be_answered_late_is_refused() {
    // Two seconds of prefill are ahead on the replica, at the prior's 40 µs a token.
    let fixture = Fixture::start(8, Duration::from_millis(2500)).await;
    let full = fixture.fill(0);
    let late = fixture.wait("late", 0, 20_000).await.unwrap();
    assert!(matches!(late, Err(Overload::TooLate { predicted, allowed: 2.5 }) if (2.8..4.0).contains(&predicted)), "{late:?}");
    assert!(fixture.queue.waiting_count() == 0 && !fixture.queue.has_waiting(Some("m")), "nothing is left of it");
    let first = fixture.wait("first", 0, 8000);
    let_tasks_run().await;
    let behind = fixture.wait("behind", 0, 9000).await.unwrap();
    assert!(matches!(behind, Err(Overload::TooLate { .. })), "what waits before it counts too: {behind:?}");
    let urgent = fixture.wait("urgent", -1, 9000);
    let_tasks_run().await;
    assert_eq!(fixture.queue.waiting_count(), 2, "nothing is ahead of it");
    drop(full);
    let_tasks_run().await;
    assert!(first.is_finished() && urgent.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_client_leaves_frees_its_slot() {
    let fixture = Fixture::start(1, LONG).await;
    let full = fixture.fill(0);
    let leaving = fixture.wait("leaves", 0, 10);
    let_tasks_run().await;
    leaving.abort();
    let_tasks_run().await;
    assert!(fixture.queue.waiting_count() == 0 && !fixture.queue.has_waiting(Some("m")));
    let next = fixture.wait("next", 0, 10);
    let_tasks_run().await;
    drop(full);
    assert_eq!(next.await.unwrap(), Ok(()));
    assert_eq!(fixture.log(), ["next"]);
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_learn_of_their_replicas_end() {
    let fixture = Fixture::start(8, LONG).await;
    let _full = fixture.fill(0);
    let waits = fixture.wait("waits", 0, 10);
    let_tasks_run().await;
    fixture.placed.fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
    assert_eq!(waits.await.unwrap(), Ok(()), "it has its turn, and finds no replica");
}

impl Fixture {
    /// Puts the only replica into this phase, with this much time left until its start ends.
    async fn enter(&self, phase: Phase, start_left: Option<Duration>) {
        let state = ReplicaStatus { start_left, ..state(phase, "m") };
        report(&self.placed.fleet, 1, false, vec![ReplicaChange { state: Some(state), ..ready(0) }]).await;
    }

    async fn lose_agent(&self) {
        self.placed.fleet.update(FleetUpdate::Detached { attachment: 1 }).await;
        let_tasks_run().await;
    }

    /// Waits for an absent replica. Returns for how long, and whether one came; `None` if the
    /// request may not wait.
    fn wait_for_arrival(&self) -> JoinHandle<Option<(Duration, bool)>> {
        self.wait_for_replica(text("hello"))
    }

    fn wait_for_replica(&self, prompt: Prompt) -> JoinHandle<Option<(Duration, bool)>> {
        let (queue, since) = (self.queue.clone(), Instant::now());
        tokio::spawn(async move {
            let prompt = Arc::new(prompt);
            let outlook = queue.estimate_arrival(&prompt)?;
            let waiting = TurnFactors { priority: 0, tenant: 0, weight: 1.0, uncached_tokens: 1, output_tokens: 0, queued_at: 0.0 };
            let (chosen, _turn) =
                queue.wait_for_turn((&prompt, &[]), waiting, queue.take_slot(share(0, 5)).unwrap(), outlook).await.unwrap();
            Some((since.elapsed(), chosen.is_some()))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_loading_replica_and_gets_it() {
    let fixture = Fixture::start(8, LONG).await;
    for left in [None, Some(Duration::from_secs(40))] {
        fixture.enter(Phase::Loading, left).await;
        let waits = fixture.wait_for_arrival();
        sleep(Duration::from_secs(60)).await;
        assert!(!waits.is_finished() && fixture.queue.waiting_count() == 1);
        fixture.enter(Phase::Ready, None).await;
        assert!(waits.await.unwrap().unwrap().1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_a_lost_agent_during_its_lease() {
    let fixture = Fixture::start(8, LONG).await;
    fixture.lose_agent().await;
    let (waited, came) = fixture.wait_for_arrival().await.unwrap().unwrap();
    assert!(!came && waited <= LEASE && waited + Duration::from_millis(200) > LEASE, "{waited:?}");
    assert_eq!(fixture.wait_for_arrival().await.unwrap(), None, "nobody waits after that");
    let _lane = attach(&fixture.placed.fleet, 2, vec![ready(0)]).await;
    fixture.placed.fleet.update(FleetUpdate::Detached { attachment: 2 }).await;
    let_tasks_run().await;
    let waits = fixture.wait_for_arrival();
    let_tasks_run().await;
    let _next = attach(&fixture.placed.fleet, 3, vec![ready(0)]).await;
    assert!(waits.await.unwrap().unwrap().1, "the agent came back");
}

#[tokio::test(start_paused = true)]
async fn a_request_does_not_wait_for_late_or_lost_replicas() {
    let longest = Duration::from_secs(30);
    let fixture = Fixture::start(8, longest).await;
    for (phase, left) in [
        (Phase::Loading, Some(longest + Duration::from_secs(1))),
        (Phase::Failed, None),
        (Phase::Stopped, None),
        (Phase::Quarantined, None),
        (Phase::Draining, None),
    ] {
        fixture.enter(phase, left).await;
        assert_eq!(fixture.wait_for_arrival().await.unwrap(), None, "{phase:?}");
    }
    fixture.enter(Phase::Loading, None).await;
    let (waited, came) = fixture.wait_for_arrival().await.unwrap().unwrap();
    assert!(!came && waited >= longest && waited < longest + Duration::from_secs(1), "{waited:?}");
    let fails = fixture.wait_for_arrival();
    let_tasks_run().await;
    fixture.enter(Phase::Failed, None).await;
    assert!(!fails.await.unwrap().unwrap().1, "whoever waited learns at once that the start has failed");
}

#[tokio::test(start_paused = true)]
async fn a_request_for_an_expected_model_waits_for_its_replica() {
    let fixture = Fixture::start(8, LONG).await;
    for soon in [None, Some(40)] {
        announce(&fixture.placed.fleet, &[("new", soon)]).await;
        let waits = fixture.wait_for_replica(for_model("new"));
        let_tasks_run().await;
        assert_eq!((fixture.queue.waiting_count_of("new"), fixture.queue.waiting_count_of("m")), (1, 0));
        let attached = ReplicaChange { state: Some(state(Phase::Ready, "new")), ..ready(1) };
        report(&fixture.placed.fleet, 1, false, vec![attached]).await;
        assert!(waits.await.unwrap().unwrap().1);
        report(&fixture.placed.fleet, 1, true, vec![ready(0)]).await;
    }
    assert!(fixture.queue.estimate_arrival(&for_model("made up")).is_none(), "what only clients name is not waited for");
}

#[tokio::test(start_paused = true)]
async fn a_request_does_not_wait_for_models_arriving_too_late() {
    let longest = Duration::from_secs(20);
    let fixture = Fixture::start(8, longest).await;
    announce(&fixture.placed.fleet, &[("new", Some(22))]).await;
    assert_eq!(fixture.wait_for_replica(for_model("new")).await.unwrap(), None);
    announce(&fixture.placed.fleet, &[("new", None)]).await;
    let (waited, came) = fixture.wait_for_replica(for_model("new")).await.unwrap().unwrap();
    assert!(!came && waited >= longest && waited < longest + Duration::from_secs(1), "{waited:?}");
    // The announcement lapses 30 s after it was made.
    let (waited, came) = fixture.wait_for_replica(for_model("new")).await.unwrap().unwrap();
    assert!(!came && waited < Duration::from_secs(11), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_a_replica_ends_with_client_or_drain() {
    let fixture = Fixture::start(8, LONG).await;
    fixture.enter(Phase::Loading, None).await;
    let (leaves, stays) = (fixture.wait_for_arrival(), fixture.wait_for_arrival());
    let_tasks_run().await;
    assert_eq!(fixture.queue.waiting_count(), 2);
    leaves.abort();
    let_tasks_run().await;
    assert_eq!(fixture.queue.waiting_count(), 1);
    fixture.shutdown.drain();
    let_tasks_run().await;
    assert!(stays.is_finished() && !stays.await.unwrap().unwrap().1);
    assert_eq!(fixture.wait_for_arrival().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn made_up_model_names_are_forgotten_or_bounded() {
    let fixture = Fixture::start(1000, LONG).await;
    let state = ReplicaStatus { phase: Phase::Loading, ..ReplicaStatus::default() };
    let loading = ReplicaChange { index: 1, state: Some(state), ..ready(1) };
    report(&fixture.placed.fleet, 1, true, vec![loading]).await;
    let mut waiting = Vec::new();
    for number in 0..2 * MAX_UNSERVED_MODELS {
        let prompt = Arc::new(for_model(&format!("made up {number}")));
        let Some(outlook) = fixture.queue.estimate_arrival(&prompt) else { continue };
        let queue = fixture.queue.clone();
        waiting.push(tokio::spawn(async move {
            let waiting =
                TurnFactors { priority: 0, tenant: number as u64, weight: 1.0, uncached_tokens: 1, output_tokens: 0, queued_at: 0.0 };
            let _ = queue.wait_for_turn((&prompt, &[]), waiting, queue.take_slot(share(number as u64, 5)).unwrap(), outlook).await;
        }));
        tokio::task::yield_now().await;
    }
    assert_eq!(waiting.len(), MAX_UNSERVED_MODELS);
    assert!(fixture.queue.estimate_arrival(&for_model(&"x".repeat(MAX_UNSERVED_NAME_BYTES + 1))).is_none());
}

#[tokio::test(start_paused = true)]
async fn requests_for_another_model_are_not_held_up() {
    let fixture = Fixture::start(8, LONG).await;
    let _full = fixture.fill(0);
    let waits = fixture.wait("waits", 0, 10);
    let_tasks_run().await;
    assert!(fixture.queue.has_waiting(Some("m")) && !fixture.queue.has_waiting(Some("other")) && !fixture.queue.has_waiting(None));
    assert!(!waits.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_request_waiting_for_its_cache_holds_up_nobody() {
    let (placed, slots) = Placement::known(2).await;
    let queue = RequestQueue::start(
        placed.placer.clone(),
        QueueLimits { max_requests: 8, max_bytes: 1 << 20, max_wait: LONG },
        &BackgroundTasks::default(),
        Shutdown::new(),
    );
    let cached = Arc::new(exact(100_000, FILES));
    placed.index.store(slots[0], &cached.token_keys(16));
    let full = placed.fleet.view().replicas[0]
        .local_load
        .start_request(InFlightCost { prompt_tokens: 30_000, uncached_tokens: 30_000, ..ONE_UNDUE }, None);
    let chosen = placed.choose(&cached);
    assert!(&*chosen.replica.id == "n/0" && !chosen.has_room(), "computing it anew would take longer than what is ahead");
    let (patient, prompt) = (queue.clone(), cached.clone());
    let waits = tokio::spawn(async move {
        patient
            .wait_for_turn((&prompt, &[]), turn_factors(0, &chosen), patient.take_slot(share(0, 0))?, chosen.wait_estimate())
            .await
            .map(|(chosen, _)| chosen.unwrap().replica.id.clone())
    });
    let_tasks_run().await;
    let (_, other) = tokio::join!(let_tasks_run(), turn(&queue, &placed.placer, 0, 100));
    assert_eq!(&*other.unwrap().0.unwrap().replica.id, "n/1");
    assert!(!waits.is_finished());
    drop(full);
    assert_eq!(&*waits.await.unwrap().unwrap(), "n/0");
}

/// Queues a tenant's request until it has its turn, which it gives up at once.
fn wait_for(fixture: &Fixture, name: &'static str, tenant: u64, bytes: u64) -> JoinHandle<Result<(), Overload>> {
    let (queue, log, placer) = (fixture.queue.clone(), fixture.log.clone(), fixture.placed.placer.clone());
    tokio::spawn(async move {
        let prompt = Arc::new(text(&"a".repeat(400)));
        let chosen = placer.choose(&prompt, &[], Instant::now()).expect("there is a replica");
        let turn = queue
            .wait_for_turn((&prompt, &[]), turn_factors(tenant, &chosen), queue.take_slot(share(tenant, bytes))?, chosen.wait_estimate())
            .await?;
        log.lock().push(name);
        drop(turn);
        Ok(())
    })
}

#[tokio::test(start_paused = true)]
async fn a_flooding_tenant_leaves_a_slot_for_the_next() {
    let fixture = Fixture::start(10, LONG).await;
    let full = fixture.fill(0);
    let mut flood = Vec::new();
    for _ in 0..12 {
        flood.push(wait_for(&fixture, "flood", 1, 0));
        let_tasks_run().await;
    }
    assert_eq!(fixture.queue.waiting_count(), 8, "four fifths");
    let reserve = |model, tenant| fixture.queue.take_slot_if_contended(Some(model), share(tenant, 0)).map(|slot| slot.is_some());
    assert_eq!(reserve("m", 1), Err(Overload::Full(QueueFull::Requests)));
    assert_eq!(reserve("m", 2), Ok(true));
    assert_eq!(reserve("other", 1), Ok(false), "which may have room");
    drop(wait_for(&fixture, "light", 2, 0));
    let_tasks_run().await;
    drop(full);
    let_tasks_run().await;
    let log = fixture.log();
    assert!(log.len() == 9 && log[..2].contains(&"light"), "{log:?}");
    let refused = futures_util::future::join_all(flood).await.into_iter().filter(|end| end.as_ref().unwrap().is_err()).count();
    assert_eq!((refused, fixture.queue.waiting_count()), (4, 0));
    assert_eq!(reserve("m", 1), Ok(false), "nobody waits");
}

#[tokio::test(start_paused = true)]
async fn a_queue_slot_is_taken_before_tokenizing_and_returned() {
    let fixture = Fixture::start(5, LONG).await;
    let full = fixture.fill(0);
    let waits = wait_for(&fixture, "waits", 1, 0);
    let_tasks_run().await;
    let reading: Vec<QueueSlot> = (0..3).map(|_| fixture.queue.take_slot_if_contended(Some("m"), share(1, 0)).unwrap().unwrap()).collect();
    assert!(fixture.queue.take_slot_if_contended(Some("m"), share(1, 0)).is_err(), "those whose prompts are being read count");
    assert_eq!(fixture.queue.waiting_count(), 1);
    drop(reading);
    assert!(fixture.queue.take_slot_if_contended(Some("m"), share(1, 0)).is_ok());
    drop(full);
    let_tasks_run().await;
    assert!(waits.is_finished() && fixture.queue.0.queues.lock().slots.queued() == 0);
}

#[tokio::test(start_paused = true)]
async fn queued_bytes_are_bounded_and_freed_with_their_client() {
    let fixture = Fixture::start(10, LONG).await;
    let _full = fixture.fill(0);
    let large = wait_for(&fixture, "large", 1, 900_000);
    let_tasks_run().await;
    assert_eq!(wait_for(&fixture, "too much", 2, 200_000).await.unwrap(), Err(Overload::Full(QueueFull::Bytes)));
    drop(wait_for(&fixture, "small", 2, 100_000));
    let_tasks_run().await;
    assert_eq!(fixture.queue.waiting_count(), 2);
    large.abort();
    let_tasks_run().await;
    drop(wait_for(&fixture, "next", 3, 200_000));
    let_tasks_run().await;
    assert_eq!(fixture.queue.waiting_count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_served_without_waiting_goes_behind_unserved_ones() {
    let fixture = Fixture::start(10, LONG).await;
    // The first request that waits creates the queue.
    let full = fixture.fill(0);
    drop(wait_for(&fixture, "first", 3, 0));
    let_tasks_run().await;
    fixture.queue.record_bypass(
        Some("m"),
        &TurnFactors { priority: 0, tenant: 1, weight: 1.0, uncached_tokens: 5000, output_tokens: 0, queued_at: 0.0 },
        0.0,
    );
    for (name, tenant) in [("served before", 1), ("new", 2)] {
        drop(wait_for(&fixture, name, tenant, 0));
        let_tasks_run().await;
    }
    drop(full);
    let_tasks_run().await;
    assert_eq!(fixture.log(), ["first", "new", "served before"]);
}
