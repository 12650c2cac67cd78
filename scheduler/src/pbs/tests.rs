use super::*;
use crate::tests::{full, plain};

/// As `OpenPBS` 23.06 prints it for a running job; the environment is shortened.
const QSTAT: &str = r#"{
    "timestamp":1795435320,
    "pbs_version":"23.06.06",
    "pbs_server":"head",
    "Jobs":{
        "12.head":{
            "Job_Name":"hostler",
            "Job_Owner":"anna@head",
            "resources_used":{
                "cpupercent":98,
                "cput":"00:02:11",
                "walltime":"00:01:58"
            },
            "job_state":"R",
            "queue":"workq",
            "ctime":"Mon Nov 23 11:59:41 2026",
            "exec_host":"x3001/0*64",
            "mtime":"Mon Nov 23 12:02:00 2026",
            "qtime":"Mon Nov 23 11:59:41 2026",
            "Rerunable":"True",
            "Resource_List":{
                "ncpus":64,
                "ngpus":4,
                "place":"excl",
                "select":"1:ngpus=4",
                "walltime":"01:30:00"
            },
            "stime":"Mon Nov 23 12:00:02 2026",
            "session_id":48121,
            "jobdir":"/home/anna",
            "substate":42,
            "Variable_List":{
                "PBS_O_HOME":"/home/anna",
                "PBS_O_PATH":"/bin:/usr/bin",
                "PROMPT":"\u001b[1m{"
            },
            "euser":"anna",
            "run_count":2,
            "etime":"Mon Nov 23 11:59:41 2026",
            "project":"_pbs_project_default"
        }
    }
}"#;

/// The start of the job in `QSTAT`.
const STARTED: u64 = 1_795_435_202;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

/// What is read at the moment of `QSTAT`, when the job has run for 118 s.
fn read_qstat(text: &str, id: &str) -> Result<JobReading, &'static str> {
    read_job(text, id, at(STARTED + 118))
}

/// What is read of `QSTAT` where its walltime is another one.
fn with_walltime(walltime: &str) -> Result<Option<SystemTime>, &'static str> {
    read_qstat(&QSTAT.replace(r#""01:30:00""#, walltime), "12.head").map(|reading| reading.ends)
}

#[test]
fn a_job_of_pbs_ends_when_it_has_run_for_its_walltime() {
    assert_eq!(read_qstat(QSTAT, "12.head"), Ok(JobReading { run: Some(2), ends: Some(at(STARTED + 5400)) }));
    // Days have one digit or two in a field of two.
    let early = QSTAT.replace("Mon Nov 23 12:00:02 2026", "Sun Nov  1 12:00:02 2026");
    let days = 22 * 86_400;
    assert_eq!(read_job(&early, "12.head", at(STARTED + 118 - days)).unwrap().ends, Some(at(STARTED + 5400 - days)));
    let in_seconds = QSTAT.replace(r#""Mon Nov 23 12:00:02 2026""#, &STARTED.to_string());
    assert_eq!(read_qstat(&in_seconds, "12.head"), read_qstat(QSTAT, "12.head"));
}

#[test]
fn the_time_in_which_a_job_was_suspended_is_added_to_its_end_but_for_what_may_be_the_age_of_the_reading() {
    let age = MAX_USED_AGE.as_secs();
    // (seconds since the start, what `QSTAT` says is used, seconds from the start to the end)
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
        let ends = read_job(&text, "12.head", at(STARTED + second)).map(|reading| reading.ends);
        assert_eq!(ends, Ok(Some(at(STARTED + end))), "{used} of the walltime is used after {second} s");
    }
    let silent = QSTAT.replace("\"resources_used\"", "\"resources_lost\"");
    assert_eq!(read_job(&silent, "12.head", at(STARTED + 86_400)).unwrap().ends, Some(at(STARTED + 5400)));
}

#[test]
fn a_walltime_has_hours_without_limit_seconds_with_a_fraction_or_seconds_alone() {
    assert_eq!(with_walltime(r#""100:00:00""#), Ok(Some(at(STARTED + 360_000))));
    assert_eq!(with_walltime(r#""00:00:30.500""#), Ok(Some(at(STARTED + 30) + Duration::from_millis(500))));
    assert_eq!(with_walltime(r#""05:00""#), Ok(Some(at(STARTED + 300))));
    assert_eq!(with_walltime("90"), Ok(Some(at(STARTED + 90))));
    for wrong in [r#""""#, r#""soon""#, "-1", r#""-1:00:00""#, r#""1e400""#, "null"] {
        assert_eq!(with_walltime(wrong), Err("a walltime that is none"), "{wrong}");
    }
}

#[test]
fn a_job_of_pbs_without_a_walltime_has_no_end() {
    let endless = QSTAT.replace(",\n                \"walltime\":\"01:30:00\"", "");
    assert_ne!(endless, QSTAT);
    assert_eq!(read_qstat(&endless, "12.head"), Ok(JobReading { run: Some(2), ends: None }));
}

#[test]
fn a_part_of_an_array_is_found_by_its_own_id() {
    let part = QSTAT.replace(r#""12.head":{"#, r#""19[1].head":{"#);
    let reading = read_qstat(QSTAT, "12.head");
    assert_eq!(read_qstat(&part, "19[1].head"), reading);
    // The server's name may be longer in the environment.
    assert_eq!(read_qstat(&part, "19[1].head.site.org"), reading);
    let two = QSTAT.replace(r#""12.head":{"#, r#""13.head":{}, "12.head":{"#);
    assert_eq!(read_qstat(&two, "12.head"), reading);
    assert_eq!(read_qstat(&two, "14.head"), Err("other jobs"));
}

#[test]
fn what_qstat_prints_without_the_job_or_its_times_is_an_error_that_says_so() {
    assert_eq!(read_qstat("", "12.head"), Err("what is no JSON"));
    assert_eq!(read_qstat(r#"{"timestamp":1795435320,"pbs_version":"23.06.06","pbs_server":"head"}"#, "12.head"), Err("no job"));
    let queued = QSTAT.replace("\"stime\":\"Mon Nov 23 12:00:02 2026\",\n", "");
    assert_eq!(read_qstat(&queued, "12.head"), Err("no start time of the job"));
    let broken = QSTAT.replace("Mon Nov 23 12:00:02 2026", "UNKNOWN");
    assert_eq!(read_qstat(&broken, "12.head"), Err("no start time of the job"));
}


#[test]
fn a_plain_job_is_a_program_that_a_login_shell_becomes() {
    insta::assert_snapshot!(render(&plain()));
}

#[test]
fn an_array_has_setup_and_options_and_keeps_every_word() {
    insta::assert_snapshot!(render(&full("1:ncpus=16:ngpus=4", &["-l", "filesystems=home:eagle", "-l", "place=excl"])));
}
