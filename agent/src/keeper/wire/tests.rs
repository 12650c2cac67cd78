//! Frames come back unchanged, however the bytes are cut.

use std::os::unix::ffi::OsStringExt;

use super::*;

fn order() -> LaunchSpec {
    let process = ProcessSpec {
        keeper: "/bin/hostler".into(),
        container: vec!["/bin/apptainer".into(), "exec".into()],
        program: "/bin/vllm".into(),
        arguments: vec![OsString::from_vec(vec![b'a', 0xff])],
        set: vec![("A".into(), "b c".into())],
        unset: vec!["VLLM_PORT".into()],
        directory: "/tmp/e0".into(),
    };
    LaunchSpec {
        process,
        forks: true,
        log: "/tmp/e0.log".into(),
        wait_seconds: Some(600),
        cpus: vec![0, 3],
        file_pool: Some("/dev/shm/hostler-kv-0".into()),
        life: LifeRecord { node: "n0".to_owned(), index: 0, fingerprint: "f".into(), epoch: 7, lives: 2, ready_in_ms: None },
    }
}

#[test]
fn an_order_survives_cut_bytes_and_names_outside_utf_8() {
    let mut bytes = BytesMut::new();
    write_message(&KeeperRequest::Start(Box::new(order())), &mut bytes);
    write_message(&KeeperRequest::Kill, &mut bytes);
    let mut buffer = BytesMut::new();
    let mut found = Vec::new();
    for byte in &bytes {
        buffer.put_u8(*byte);
        found.extend(parse_request(&mut buffer).unwrap());
    }
    assert_eq!(found, [KeeperRequest::Start(Box::new(order())), KeeperRequest::Kill]);
    assert!(buffer.is_empty());
}

#[test]
fn output_is_carried_as_it_was_printed() {
    let mut buffer = BytesMut::new();
    write_output(b"\xff\n\0", &mut buffer);
    write_message(&KeeperNotice::Stuck(vec![4]), &mut buffer);
    assert_eq!(parse_keeper_frame(&mut buffer).unwrap(), Some(KeeperFrame::Output(Bytes::from_static(b"\xff\n\0"))));
    assert_eq!(parse_keeper_frame(&mut buffer).unwrap(), Some(KeeperFrame::Notice(KeeperNotice::Stuck(vec![4]))));
    assert_eq!(parse_keeper_frame(&mut buffer).unwrap(), None);
}

#[test]
fn malformed_keeper_messages_are_errors_and_never_panic() {
    let cases: [&[u8]; 4] = [&[0, 0, 0, 0, 0], &[255, 255, 255, 255, 0], &[0, 0, 0, 2, 9, 0], &[0, 0, 0, 3, 0, b'{', b'}']];
    for case in cases {
        assert!(parse_keeper_frame(&mut BytesMut::from(case)).is_err(), "{case:?}");
        assert!(parse_request(&mut BytesMut::from(case)).is_err(), "{case:?}");
    }
}
