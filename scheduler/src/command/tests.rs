use super::*;

#[test]
fn pbs_commands_are_also_looked_up_at_its_installation() {
    assert_eq!(parse_pbs_exec("PBS_SERVER=head\nPBS_EXEC=/opt/pbs-23\nPBS_START_MOM=1\n"), Some("/opt/pbs-23".into()));
    assert_eq!(parse_pbs_exec("PBS_HOME=/var/spool/pbs\n"), None);
    assert_eq!(join_folders(Some("/bin:/usr/bin".into()), vec!["/opt/pbs/bin".into()]), "/bin:/usr/bin:/opt/pbs/bin");
    assert_eq!(join_folders(Some(".::/bin".into()), vec![]), "/bin", "not where the job happens to be");
    assert_eq!(join_folders(None, vec!["/opt/pbs/bin".into()]), "/opt/pbs/bin");
}

#[test]
fn a_commands_error_is_shortened_to_one_line() {
    assert_eq!(shorten("qstat: cannot connect\nto server head (errno=15010)\n"), "qstat: cannot connect to server head (errno=15010)");
    assert_eq!((shorten(" \n"), shorten(&"x".repeat(5000)).len()), ("nothing".to_owned(), MAX_QUOTED_CHARS));
}

/// Output of a command with this exit code and standard error.
fn ended(code: i32, stderr: &str) -> Output {
    use std::os::unix::process::ExitStatusExt;
    Output { status: std::process::ExitStatus::from_raw(code << 8), stdout: b"said\n".into(), stderr: stderr.into() }
}

#[test]
fn a_failure_is_tolerated_only_if_each_complaint_is() {
    let judged = |code, stderr| judge("/bin/qdel".into(), &ended(code, stderr), &["Unknown Job Id"]).map(|printed| printed.text);
    assert_eq!(judged(0, "qdel: a warning\n").unwrap(), "said\n");
    assert_eq!(judged(153, "qdel: Unknown Job Id 12.head\n\nqdel: Unknown Job Id 13.head\n").unwrap(), "said\n");
    let failed = judged(153, "qdel: Unauthorized Request  11.head\nqdel: Unknown Job Id 12.head\n").unwrap_err();
    assert_eq!(
        failed.to_string(),
        "/bin/qdel ended with exit status: 153: qdel: Unauthorized Request 11.head qdel: Unknown Job Id 12.head"
    );
    assert!(judged(1, "").is_err(), "it did not say why");
}

#[tokio::test]
async fn a_missing_command_is_reported_with_the_searched_path() {
    let error = run(Call::ask("hostler-has-no-such-scheduler", [])).await.unwrap_err().to_string();
    assert!(error.starts_with("there is no program `hostler-has-no-such-scheduler`; looked for that name in PATH="), "{error}");
}

#[tokio::test]
async fn a_command_gets_arguments_input_and_utc() {
    let printed = run(Call::ask("sh", ["-c", "echo $TZ $SLURM_TIME_FORMAT $0", "word"])).await.unwrap();
    assert_eq!(printed.text, "UTC %s word\n");
    let call = Call::change("cat", vec!["-".into()]).with_input("#!/bin/bash\n".into());
    assert_eq!(run(call).await.unwrap().text, "#!/bin/bash\n");
    let unreadable = run(Call::ask("echo", ["twelve"])).await.unwrap().read(|_| Err::<(), _>("no number")).unwrap_err();
    assert!(unreadable.to_string().ends_with("echo printed no number: twelve"), "{unreadable}");
}
