use std::sync::mpsc;

use futures_util::FutureExt;

use super::*;

#[tokio::test]
async fn work_waits_for_a_thread_in_bounded_numbers() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    let mut waiting: Vec<_> = (0..QUEUED_PER_THREAD).map(|number| Box::pin(pool.run(move || number))).collect();
    for work in &mut waiting {
        assert!(work.as_mut().now_or_never().is_none());
    }
    assert_eq!(pool.run(|| ()).await, Err(PoolError::Full));
    go.send(()).unwrap();
    assert_eq!(running.await, Ok(Ok(())));
    for (number, work) in waiting.into_iter().enumerate() {
        assert_eq!(work.await, Ok(number));
    }
}

#[tokio::test]
async fn abandoned_work_keeps_its_thread_until_it_ends() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    assert!(pool.run(move || wait.recv()).now_or_never().is_none());
    let mut next = Box::pin(pool.run(|| 7));
    assert!(next.as_mut().now_or_never().is_none());
    assert_eq!(pool.threads.available_permits(), 0);
    go.send(()).unwrap();
    assert_eq!(next.await, Ok(7));
}

#[tokio::test]
async fn abandoned_waiting_work_frees_its_place() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    for _ in 0..3 * QUEUED_PER_THREAD {
        assert!(pool.run(|| ()).now_or_never().is_none());
    }
    assert_eq!(pool.slots.available_permits(), QUEUED_PER_THREAD);
    go.send(()).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_panic_ends_its_own_work_only() {
    let pool = ThreadPool::new(1);
    let broken: Result<(), PoolError> = pool.run(|| panic!("on purpose")).await;
    assert_eq!(broken, Err(PoolError::Panicked));
    assert_eq!(pool.run(|| 7).await, Ok(7));
}
