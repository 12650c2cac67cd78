use super::*;

fn turns() -> Arc<LoadTurns> {
    Arc::default()
}

fn acquire(turns: &Arc<LoadTurns>) -> tokio::task::JoinHandle<Option<Turn>> {
    let turns = Arc::clone(turns);
    tokio::spawn(async move { turns.acquire("files:/m").await })
}

fn wish(holds: bool) -> Option<LoadWish> {
    Some(LoadWish { file_system: "files:/m".into(), holds })
}

#[tokio::test(start_paused = true)]
async fn a_read_waits_for_its_turn_and_gives_it_back() {
    let turns = turns();
    let mut router = turns.attach(1, 2);
    let waiting = acquire(&turns);
    assert_eq!(router.next_wish().await, wish(false));
    router.hear("files:/m", RouterWord::Queued(3));
    assert_eq!(turns.waits_for().unwrap(), "waits for its turn to read files:/m (3 nodes are before it)");
    sleep(Duration::from_secs(1800)).await;
    assert!(!waiting.is_finished(), "a router that answers is waited for");
    router.hear("files:/m", RouterWord::Granted);
    let turn = waiting.await.unwrap().unwrap();
    assert_eq!(router.next_wish().await, wish(true));
    let shared = turns.acquire("files:/m").await.unwrap();
    assert!(Arc::ptr_eq(&turn, &shared), "engines of one agent have one turn");
    drop(turn);
    assert_eq!(turns.waits_for(), None);
    drop(shared);
    assert_eq!(router.next_wish().await, None);
}

#[tokio::test(start_paused = true)]
async fn without_a_word_the_read_begins() {
    let turns = turns();
    let began = Instant::now();
    assert!(acquire(&turns).await.unwrap().is_none(), "no router has this agent");
    assert_eq!(began.elapsed(), WORD_TIMEOUT);
    let mut silent = turns.attach(1, 2);
    let waiting = acquire(&turns);
    assert_eq!(silent.next_wish().await, wish(false));
    assert!(waiting.await.unwrap().is_none());
    assert_eq!(silent.next_wish().await, None, "nothing is wanted any longer");
}

#[tokio::test(start_paused = true)]
async fn a_router_without_a_limit_is_not_asked() {
    let turns = turns();
    let _old = turns.attach(1, 0);
    let began = Instant::now();
    assert!(acquire(&turns).await.unwrap().is_none());
    assert!(began.elapsed().is_zero());
}

#[tokio::test(start_paused = true)]
async fn the_router_that_takes_over_is_asked_next() {
    let turns = turns();
    let mut first = turns.attach(1, 1);
    let waiting = acquire(&turns);
    assert_eq!(first.next_wish().await, wish(false));
    first.hear("files:/m", RouterWord::Queued(0));
    let mut second = turns.attach(2, 1);
    drop(first);
    assert_eq!(second.next_wish().await, wish(false));
    second.hear("files:/m", RouterWord::Granted);
    let _turn = waiting.await.unwrap().unwrap();
    let mut third = turns.attach(3, 1);
    assert_eq!(third.next_wish().await, wish(true), "it counts who reads already");
}
