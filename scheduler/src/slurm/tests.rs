use super::*;
use crate::tests::{full, plain};

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

#[test]
fn a_job_of_slurm_ends_at_a_second_or_never() {
    let read_end = |text| read_job(text).map(|reading| reading.ends);
    assert_eq!(read_end("1795435202\n"), Ok(Some(at(1_795_435_202))));
    for endless in ["N/A", "NONE\n", "UNLIMITED", "INVALID", "Unknown\n"] {
        assert_eq!(read_end(endless), Ok(None), "{endless}");
    }
    assert_eq!(read_end("\n"), Err("no job"));
    assert_eq!(read_end("2026-11-23T12:00:02\n"), Err("no time in seconds"));
    assert_eq!(read_end("99999999999999999999\n"), Err("no time in seconds"));
}

#[test]
fn slurms_kill_wait_is_found_among_its_settings() {
    let config = "Configuration data as of 2026-11-23T12:00:02\nInactiveLimit           = 0 sec\nKillOnBadExit           = 0\n\
                  KillWait                = 30 sec\nLaunchParameters        = (null)\n";
    assert_eq!(read_kill_wait(config), Ok(Duration::from_secs(30)));
    assert_eq!(read_kill_wait("KillOnBadExit           = 0\n"), Err("no `KillWait`"));
}


#[test]
fn a_plain_job_is_a_script_that_has_srun_start_the_program() {
    insta::assert_snapshot!(render(&plain()));
}

#[test]
fn an_array_has_setup_and_options_and_keeps_every_word() {
    insta::assert_snapshot!(render(&full("--gpus-per-node=4  --cpus-per-task=16", &["--constraint", "a100|h100"])));
}
