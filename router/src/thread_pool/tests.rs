use std::sync::mpsc;

use futures_util::FutureExt;

use super::*;

const TENANT: u64 = 1;

/// Long work of that tenant, for which a pool of one thread has one.
const LONG: (u64, usize) = (TENANT, LONG_WORK_BYTES + 1);

/// How many jobs of one tenant wait beside the one that runs, of a pool with one thread: four
/// fifths of the places, less one.
const WAITING: usize = ((1 + QUEUED_PER_THREAD) * 4).div_ceil(5) - 1;

#[tokio::test]
async fn work_waits_for_a_thread_in_bounded_numbers() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(LONG, move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    let mut waiting: Vec<_> = (0..WAITING).map(|number| Box::pin(pool.run(LONG, move || number))).collect();
    for work in &mut waiting {
        assert!(work.as_mut().now_or_never().is_none());
    }
    const { assert!(WAITING > 256, "that many clients may begin at once") };
    assert_eq!(pool.run(LONG, || ()).now_or_never(), Some(Err(PoolError::Full)));
    go.send(()).unwrap();
    assert_eq!(running.await, Ok(Ok(())));
    for (number, work) in waiting.into_iter().enumerate() {
        assert_eq!(work.await, Ok(number));
    }
}

#[tokio::test]
async fn a_tenant_waits_for_one_job_of_another_not_for_all() {
    let pool = ThreadPool::new(1);
    let (done, order) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(LONG, move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    let begin = |tenant| {
        let done = done.clone();
        let mut job = Box::pin(pool.run((tenant, LONG.1), move || done.send(tenant).unwrap()));
        assert!(job.as_mut().now_or_never().is_none());
        job
    };
    let mut jobs: Vec<_> = std::iter::from_fn(|| (pool.slots.taken() <= WAITING).then(|| begin(TENANT))).collect();
    jobs.push(begin(2));
    go.send(()).unwrap();
    running.await.unwrap().unwrap();
    for job in futures_util::future::join_all(jobs).await {
        job.unwrap();
    }
    let order: Vec<u64> = order.try_iter().collect();
    assert!(order.iter().position(|tenant| *tenant == 2) < Some(2), "{order:?}");
    assert_eq!(order.len(), WAITING + 1);
}

#[tokio::test]
async fn abandoned_work_keeps_its_thread_until_it_ends() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    assert!(pool.run(LONG, move || wait.recv()).now_or_never().is_none());
    let mut next = Box::pin(pool.run(LONG, || 7));
    assert!(next.as_mut().now_or_never().is_none());
    assert_eq!(pool.threads.available_permits(), 1);
    go.send(()).unwrap();
    assert_eq!(next.await, Ok(7));
}

#[tokio::test]
async fn abandoned_waiting_work_frees_its_place() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(LONG, move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    for _ in 0..3 * QUEUED_PER_THREAD {
        assert!(pool.run(LONG, || ()).now_or_never().is_none());
    }
    assert_eq!(pool.slots.taken(), 1);
    go.send(()).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_panic_ends_its_own_work_only() {
    let pool = ThreadPool::new(1);
    let broken: Result<(), PoolError> = pool.run(LONG, || panic!("on purpose")).await;
    assert_eq!(broken, Err(PoolError::Panicked));
    assert_eq!(pool.run(LONG, || 7).await, Ok(7));
}

#[tokio::test]
async fn short_work_does_not_wait_for_long_work() {
    let pool = ThreadPool::new(1);
    let (go, wait) = mpsc::channel::<()>();
    let mut running = Box::pin(pool.run(LONG, move || wait.recv()));
    assert!(running.as_mut().now_or_never().is_none());
    let mut waiting = Box::pin(pool.run(LONG, || ()));
    assert!(waiting.as_mut().now_or_never().is_none());
    for tenant in [TENANT, 2] {
        assert_eq!(pool.run((tenant, LONG_WORK_BYTES), || 7).await, Ok(7));
    }
    go.send(()).unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(waiting.await, Ok(()));
}
