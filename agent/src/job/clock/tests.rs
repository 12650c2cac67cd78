use std::time::UNIX_EPOCH;

use super::*;

const TIME_TO_LEAVE: Duration = Duration::from_secs(40);

/// Both clocks of the host.
fn now() -> (Instant, SystemTime) {
    (Instant::now() + Duration::from_secs(3600), UNIX_EPOCH + Duration::from_secs(1_795_435_202))
}

fn reading(ends: SystemTime) -> JobReading {
    JobReading { run: Some(2), ends_at: Some(ends), queued: None }
}

#[test]
fn an_agent_leaves_early_enough_before_its_jobs_end() {
    let now = now();
    let facts = JobFacts::of(reading(now.1 + Duration::from_secs(3600)), 1, now, TIME_TO_LEAVE);
    let at = |seconds| Some(now.0 + Duration::from_secs(seconds));
    assert_eq!(facts, JobFacts { run: 2, ends_at: at(3600), leaves_at: at(3560), queued: None });
    let endless = JobFacts::of(JobReading { run: None, ends_at: None, queued: None }, 3, now, TIME_TO_LEAVE);
    assert_eq!(endless, JobFacts { run: 3, ends_at: None, leaves_at: None, queued: None });
}

#[test]
fn a_job_end_in_the_distant_past_is_ignored() {
    let now = now();
    let ends = |overtime| JobFacts::of(reading(now.1 - overtime), 1, now, TIME_TO_LEAVE).ends_at;
    assert_eq!(ends(Duration::from_secs(15)), Some(now.0 - Duration::from_secs(15)));
    assert_eq!(ends(MAX_OVERTIME), Some(now.0 - MAX_OVERTIME));
    assert_eq!(ends(MAX_OVERTIME + Duration::from_secs(1)), None);
}

#[test]
fn only_a_changed_job_end_counts_as_news() {
    let now = now();
    let facts = |left: Duration| JobFacts::of(reading(now.1 + left), 1, now, TIME_TO_LEAVE);
    let hour = Duration::from_secs(3600);
    assert!(facts(hour).is_same_as(&facts(hour + Duration::from_millis(400))));
    assert!(facts(hour).is_same_as(&facts(hour - Duration::from_millis(400))));
    assert!(!facts(hour).is_same_as(&facts(hour / 2)) && !facts(hour / 2).is_same_as(&facts(hour)));
    let endless = JobFacts { ends_at: None, leaves_at: None, ..facts(hour) };
    assert!(!facts(hour).is_same_as(&endless) && endless.is_same_as(&endless));
    assert!(!facts(hour).is_same_as(&JobFacts { run: 3, ..facts(hour) }));
}

#[test]
fn an_agent_serves_for_three_quarters_of_a_short_job() {
    for (left, time_to_leave) in [(0, 0), (8, 2), (40, 10), (160, 40), (161, 40), (7200, 40)] {
        assert_eq!(cap(TIME_TO_LEAVE, Duration::from_secs(left)), Duration::from_secs(time_to_leave), "{left} s");
    }
}

/// Clock of a job that was never read. Its scheduler's commands do not exist, so it never will be.
fn clock() -> JobClock {
    let job = Job::detect(|name| (name == "PBS_JOBID").then(|| "12.head".to_owned())).unwrap();
    let facts = JobFacts { run: 1, ends_at: None, leaves_at: None, queued: None };
    JobClock {
        job,
        grace: TIME_TO_LEAVE,
        time_to_leave: TIME_TO_LEAVE,
        first_left: OnceLock::new(),
        facts: watch::Sender::new(facts),
        run: OnceLock::new(),
        is_failing: AtomicBool::new(false),
    }
}

#[tokio::test]
async fn a_failed_reading_keeps_the_last_known_job_end() {
    let clock = clock();
    clock.take(Ok(reading(SystemTime::now() + Duration::from_secs(3600))));
    let known = *clock.facts().borrow();
    assert!(known.run == 2 && known.leaves_at.is_some());
    let late = || Err(CommandError::Late { program: "/bin/qstat".into(), deadline: TIME_TO_LEAVE });
    clock.take(late());
    clock.take(late());
    assert_eq!(*clock.facts().borrow(), known);
    clock.take(Ok(JobReading { run: Some(2), ends_at: None, queued: None }));
    assert_eq!(clock.facts().borrow().ends_at, None, "an operator has lifted the limit");
}

#[tokio::test]
async fn the_first_reading_decides_how_early_the_agent_leaves() {
    let time_to_leave = |clock: &JobClock, left| {
        clock.take(Ok(reading(SystemTime::now() + Duration::from_secs(left))));
        let facts = *clock.facts().borrow();
        (facts.ends_at.unwrap() - facts.leaves_at.unwrap()).as_secs_f32().round()
    };
    // Each reading: (time left, how long before the job's end the agent leaves).
    for readings in [[(40, 10.0), (20, 10.0), (7200, 10.0)], [(7200, 40.0), (60, 40.0), (41, 40.0)]] {
        let clock = clock();
        for (left, expected) in readings {
            assert_eq!(time_to_leave(&clock, left), expected, "{left} s left, of {readings:?}");
        }
    }
}

#[tokio::test]
async fn an_agent_keeps_the_first_run_number_that_it_read() {
    let clock = clock();
    let run = || clock.facts().borrow().run;
    clock.take(Err(CommandError::Late { program: "/bin/qstat".into(), deadline: TIME_TO_LEAVE }));
    assert_eq!(run(), 1);
    clock.take(Ok(JobReading { run: Some(2), ends_at: None, queued: None }));
    assert_eq!(run(), 2);
    clock.take(Ok(JobReading { run: Some(3), ends_at: Some(SystemTime::now() + Duration::from_secs(3600)), queued: None }));
    assert_eq!(run(), 2, "the next run has an agent of its own");
}

#[tokio::test(start_paused = true)]
async fn the_clock_says_when_to_leave() {
    let clock = clock();
    let begun = Instant::now();
    let leaves_at = Some(begun + Duration::from_secs(20));
    clock.facts.send_replace(JobFacts { run: 1, ends_at: leaves_at.map(|leaves_at| leaves_at + TIME_TO_LEAVE), leaves_at, queued: None });
    clock.wait_to_leave(Duration::from_secs(60)).await;
    assert_eq!(begun.elapsed().as_secs(), 20);
}

#[test]
fn a_far_end_is_read_less_often() {
    let pause = |minutes: Option<u64>| {
        pause_between_readings(Duration::from_secs(60), minutes.map(|minutes| Duration::from_secs(60 * minutes))).as_secs()
    };
    assert_eq!([None, Some(5), Some(60), Some(120), Some(12 * 60), Some(48 * 60)].map(pause), [60, 60, 60, 120, 720, 900]);
}
