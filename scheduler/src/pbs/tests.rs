use super::*;
use crate::tests::{full, plain};

/// A running job as `OpenPBS` 23.06 prints it, with `|` as the separator. Unread attributes are
/// left out, except those that make its JSON unreadable.
const QSTAT: &str = r#"Job Id: 12.head|Job_Name=hostler|Job_Owner=anna@head|resources_used.cpupercent=98|resources_used.cput=00:02:11|resources_used.walltime=00:01:58|job_state=R|queue=workq|Account_Name=nan|ctime=Mon Nov 23 11:59:41 2026|exec_host=x3001/0*64|Hold_Types=n|Resource_List.ncpus=64|Resource_List.ngpus=4|Resource_List.place=excl|Resource_List.select=1:ngpus=4|Resource_List.walltime=01:30:00|stime=Mon Nov 23 12:00:02 2026|session_id=48121|substate=42|Variable_List=PBS_O_HOME=/home/anna,PBS_O_WORKDIR=/home/anna/^^C bung|comment=Job run at Mon Nov 23 at 12:00 on (x3001:ncpus=64)|run_count=2|Submit_arguments=-N hostler -- /bin/bash -lc sed s/\\./x/ \\\\nexec a "b" ^
okina=1|argument_list=<jsdl-hpcpa:Argument>-lc</jsdl-hpcpa:Argument>|project=_pbs_project_default

"#;

/// Start of the job in `QSTAT`.
const STARTED: u64 = 1_795_435_202;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn separated(text: &str) -> String {
    text.replace('|', SEPARATOR)
}

/// Parses at the moment of `QSTAT`, when the job has run for 118 s.
fn read_qstat(text: &str, id: &str) -> Result<JobReading, &'static str> {
    read_job(&separated(text), id, at(STARTED + 118))
}

/// Parses `QSTAT` with another walltime.
fn with_walltime(walltime: &str) -> Result<Option<SystemTime>, &'static str> {
    read_qstat(&QSTAT.replace("01:30:00", walltime), "12.head").map(|reading| reading.ends_at)
}

#[test]
fn a_pbs_job_ends_after_its_walltime_of_running() {
    assert_eq!(
        read_qstat(QSTAT, "12.head"),
        Ok(JobReading { run: Some(2), ends_at: Some(at(STARTED + 5400)), queued: Some(Duration::from_secs(21)) })
    );
    // Days have one or two digits in a field of two.
    let early = QSTAT.replace("Mon Nov 23 12:00:02 2026", "Sun Nov  1 12:00:02 2026");
    let days = 22 * 86_400;
    assert_eq!(read_job(&separated(&early), "12.head", at(STARTED + 118 - days)).unwrap().ends_at, Some(at(STARTED + 5400 - days)));
    let in_seconds = QSTAT.replace("Mon Nov 23 12:00:02 2026", &STARTED.to_string());
    assert_eq!(read_qstat(&in_seconds, "12.head"), read_qstat(QSTAT, "12.head"));
}

#[test]
fn suspended_time_postpones_the_end_of_a_pbs_job() {
    let age = crate::run_time::MAX_USED_AGE.as_secs();
    // (seconds since the start, used time in `QSTAT`, seconds from the start to the end)
    for (second, used, end) in [
        (118, "00:01:58", 5400),
        (118, "00:00:00", 5400),
        (118 + age, "00:01:58", 5400),
        (118 + 3600, "00:01:58", 5400 + 3600 - age),
        (118 + 86_400, "00:01:58", 5400 + 86_400 - age),
        (5400 + 600, "01:30:00", 5400 + 600 - age),
        (86_400, "soon", 5400),
    ] {
        let text = QSTAT.replace("00:01:58", used);
        let ends = read_job(&separated(&text), "12.head", at(STARTED + second)).map(|reading| reading.ends_at);
        assert_eq!(ends, Ok(Some(at(STARTED + end))), "{used} of the walltime is used after {second} s");
    }
    let silent = QSTAT.replace("resources_used", "resources_lost");
    assert_eq!(read_job(&separated(&silent), "12.head", at(STARTED + 86_400)).unwrap().ends_at, Some(at(STARTED + 5400)));
}

#[test]
fn a_pbs_walltime_is_parsed_in_every_form() {
    assert_eq!(with_walltime("100:00:00"), Ok(Some(at(STARTED + 360_000))));
    assert_eq!(with_walltime("00:00:30.500"), Ok(Some(at(STARTED + 30) + Duration::from_millis(500))));
    assert_eq!(with_walltime("05:00"), Ok(Some(at(STARTED + 300))));
    assert_eq!(with_walltime("90"), Ok(Some(at(STARTED + 90))));
    for wrong in ["", "soon", "-1", "-1:00:00", "1e400", "null"] {
        assert_eq!(with_walltime(wrong), Err("a walltime that is none"), "{wrong}");
    }
}

#[test]
fn a_pbs_job_without_a_walltime_has_no_end() {
    let endless = QSTAT.replace("|Resource_List.walltime=01:30:00", "");
    assert_ne!(endless, QSTAT);
    assert_eq!(read_qstat(&endless, "12.head"), Ok(JobReading { run: Some(2), ends_at: None, queued: Some(Duration::from_secs(21)) }));
}

#[test]
fn a_pbs_array_part_is_found_by_its_own_id() {
    let part = QSTAT.replace("12.head|", "19[1].head|");
    let reading = read_qstat(QSTAT, "12.head");
    assert_eq!(read_qstat(&part, "19[1].head"), reading);
    // The environment may have a longer form of the server's name.
    assert_eq!(read_qstat(&part, "19[1].head.site.org"), reading);
    let two = format!("Job Id: 13.head|job_state=Q\n{QSTAT}");
    assert_eq!(read_qstat(&two, "12.head"), reading);
    assert_eq!(read_qstat(&two, "14.head"), Err("other jobs"));
}

#[test]
fn unexpected_qstat_output_is_an_error_naming_the_gap() {
    assert_eq!(read_qstat("", "12.head"), Err("no job"));
    assert_eq!(read_qstat("Job Id: 12.head\n", "12.head"), Err("a job without attributes"));
    let queued = QSTAT.replace("|stime=Mon Nov 23 12:00:02 2026", "");
    assert_eq!(read_qstat(&queued, "12.head"), Err("no start time of the job"));
    let broken = QSTAT.replace("Mon Nov 23 12:00:02 2026", "UNKNOWN");
    assert_eq!(read_qstat(&broken, "12.head"), Err("no start time of the job"));
}

#[test]
fn a_plain_pbs_job_is_the_program_itself() {
    insta::assert_snapshot!(render(&plain()));
}

#[test]
fn a_pbs_array_keeps_setup_options_and_every_word() {
    insta::assert_snapshot!(render(&full("1:ncpus=16:ngpus=4", &["-l", "filesystems=home:eagle", "-l", "place=excl"])));
}

/// Jobs as `OpenPBS` 23.06 prints them, with `|` as the separator and without unread attributes.
///
/// They are an array, a held array, and jobs in other states. One part of the first array runs, one
/// is being ended, one has ended and one waits with its array's comment.
const LIST: &str = "\
Job Id: 19[].head|Job_Name=hostler-chat|job_state=B|ctime=Mon Nov 23 11:59:41 2026|Hold_Types=n|Resource_List.walltime=01:30:00|stime=Mon Nov 23 12:00:02 2026|comment=Job Array Began at Mon Nov 23 at 12:00|array=True|array_state_count=Queued:1 Running:2 Exiting:0 Expired:1|estimated.exec_vnode=(x3001:ncpus=64)|estimated.start_time=Mon Nov 23 13:30:02 2026
Job Id: 19[1].head|resources_used.walltime=00:01:58|job_state=R|ctime=Mon Nov 23 11:59:41 2026|exec_host=x3001/0*64|Resource_List.walltime=01:30:00|stime=Mon Nov 23 12:00:02 2026|array_index=1|comment=Job run at Mon Nov 23 at 12:00 on (x3001:ncpus=64)|run_count=1
Job Id: 19[2].head|job_state=E|exec_host=x3002/0*64+x3003/0*64
Job Id: 19[3].head|job_state=X|comment=Subjob finished
Job Id: 19[4].head|job_state=Q|ctime=Mon Nov 23 11:59:41 2026|Hold_Types=n|Resource_List.walltime=01:30:00|stime=Mon Nov 23 12:00:02 2026|comment=Job Array Began at Mon Nov 23 at 12:00
Job Id: 20.head|job_state=H|Hold_Types=u|comment=Job held by anna on Mon Nov 23 12:01:00 2026
Job Id: 21[].head|job_state=H|Hold_Types=s
Job Id: 21[1].head|job_state=Q|Hold_Types=s
Job Id: 22.head|job_state=W|Hold_Types=n|estimated.start_time=UNKNOWN
Job Id: 23.head|job_state=S|exec_host=x3004/0|stime=1795435202|Resource_List.ncpus=1
Job Id: 24.head|job_state=F
Job Id: 25.head|job_state=M
Job Id: 26.head|job_state=Q|Hold_Types=n|comment=Not Running: Insufficient amount of resource: ngpus (R: 4 A: 0 T: 8)

";

fn read_list(text: &str) -> Result<Vec<ScheduledJob>, &'static str> {
    read_jobs(&separated(text))
}

#[test]
fn pbs_lists_have_jobs_and_parts_but_no_array() {
    let jobs = read_list(LIST).unwrap();
    let seen: Vec<_> = jobs.iter().map(|job| (job.id.as_str(), job.state, job.host.as_str())).collect();
    let expected = [
        ("19[1].head", JobState::Running, "x3001"),
        ("19[2].head", JobState::Ending, "x3002"),
        ("19[4].head", JobState::Queued, ""),
        ("20.head", JobState::Held, ""),
        ("21[1].head", JobState::Held, ""),
        ("22.head", JobState::Queued, ""),
        ("23.head", JobState::Suspended, "x3004"),
        ("26.head", JobState::Queued, ""),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_pbs_jobs_times_are_those_of_its_present_run() {
    let jobs = read_list(LIST).unwrap();
    let submitted = Some(at(STARTED - 21));
    let running = ScheduledJob {
        id: "19[1].head".into(),
        state: JobState::Running,
        comment: "Job run at Mon Nov 23 at 12:00 on (x3001:ncpus=64)".into(),
        submitted,
        started: Some(at(STARTED)),
        run_time: Some(RunTime { limit: Duration::from_secs(5400), used: Some(Duration::from_secs(118)) }),
        estimated_start: None,
        host: "x3001".into(),
    };
    assert_eq!(jobs[0], running);
    let queued = ScheduledJob {
        id: "19[4].head".into(),
        state: JobState::Queued,
        comment: String::new(),
        submitted,
        started: None,
        run_time: None,
        estimated_start: Some(at(STARTED + 5400)),
        host: String::new(),
    };
    assert_eq!(jobs[2], queued);
    assert_eq!((jobs[5].estimated_start, jobs[6].started, jobs[6].run_time), (None, Some(at(STARTED)), None));
    assert_eq!(jobs[7].comment, "Not Running: Insufficient amount of resource: ngpus (R: 4 A: 0 T: 8)");
}

#[test]
fn an_unreadable_pbs_list_is_an_error() {
    assert_eq!(read_list(""), Err("no job"));
    assert_eq!(read_list("{}"), Err("no job"));
    assert_eq!(read_list(&LIST.replace("job_state=S", "job_state=Z")), Err("a job in an unknown state"));
    assert_eq!(read_list(&LIST.replace("job_state=S|", "")), Err("a job without a state"));
}

#[test]
fn pbs_array_parts_are_deleted_one_by_one() {
    let ids: Vec<String> = ["12.head", "19[1].head", "20[].head", "19[3].head", "13.head"].map(str::to_owned).into();
    let calls = split_for_qdel(&ids);
    assert_eq!(calls, [vec!["19[1].head"], vec!["19[3].head"], vec!["12.head", "20[].head", "13.head"]]);
    assert!(split_for_qdel(&[]).is_empty());
}

#[test]
fn a_pbs_server_is_identified_by_its_name() {
    let printed = "Server: head\n    server_state = Active\n    server_host = head2.example.org\n    scheduling = True\n\n";
    assert_eq!(read_server(printed), Ok("head".into()));
    for other in ["", "Server:\n", "Job id            Name             User\n"] {
        assert_eq!(read_server(other), Err("no server"), "{other}");
    }
}
