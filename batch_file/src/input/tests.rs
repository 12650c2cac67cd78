//! Files of requests, right and wrong.

use std::io::Write as _;

use tempfile::NamedTempFile;

use super::*;

fn request(id: &str) -> String {
    format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{{\"prompt\":\"{id}\"}}}}\n")
}

fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn problems(text: &str) -> String {
    match Input::check(file(text).path(), &InputBounds::default()) {
        Err(error @ FileError::Input { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn requests_are_read_by_number_and_empty_lines_are_skipped() {
    let text = format!("{}\n{}\r\n{}", request("a"), request("b").trim_end(), request("c").trim_end());
    let file = file(&text);
    let input = Input::check(file.path(), &InputBounds::default()).unwrap();
    let lines: Vec<Vec<u8>> = (0..input.requests()).map(|number| input.read(number).unwrap()).collect();
    assert_eq!(lines, ["a", "b", "c"].map(|id| request(id).trim_end().as_bytes().to_owned()));
}

#[test]
fn requests_of_one_model_share_a_model_number() {
    let of = |id: usize, model: &str| {
        format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/x\",\"body\":{{\"model\":\"{model}\"}}}}\n")
    };
    let file = file(&[of(0, "a"), of(1, "b"), of(2, "a")].concat());
    let input = Input::check(file.path(), &InputBounds::default()).unwrap();
    assert_eq!((input.model_count(), input.model(0) == input.model(2), input.model(0) == input.model(1)), (2, true, false));
}

#[test]
fn different_input_files_have_different_digests() {
    let digest = |text: &str| Input::check(file(text).path(), &InputBounds::default()).unwrap().digest();
    assert_eq!(digest(&request("a")), digest(&request("a")));
    assert_ne!(digest(&request("a")), digest(&request("b")));
}

#[test]
fn wrong_lines_are_named_up_to_a_limit() {
    let message = problems(&[request("a"), "{\n".to_owned(), request("b"), request("a")].concat());
    assert!(message.contains("line 2: it is no JSON object") && message.contains("line 4: line 1 has its custom_id \"a\""), "{message}");
    assert!(message.starts_with("nothing was sent") && !message.contains("line 3"), "{message}");
    let message = problems(&"{\n".repeat(25));
    assert!(message.contains("line 10:") && !message.contains("line 11:") && message.ends_with("and 15 more lines"), "{message}");
}

#[test]
fn a_file_without_requests_is_refused() {
    assert!(matches!(Input::check(file("\n\n").path(), &InputBounds::default()), Err(FileError::Empty(_))));
}

#[test]
fn an_input_line_changed_during_the_batch_is_noticed() {
    let file = file(&[request("a"), request("b")].concat());
    let input = Input::check(file.path(), &InputBounds::default()).unwrap();
    std::fs::write(file.path(), [request("a"), request("c")].concat()).unwrap();
    assert!(input.read(0).is_ok());
    assert!(matches!(input.read(1), Err(FileError::InputChanged { line: 2, .. })));
    std::fs::write(file.path(), request("a")).unwrap();
    assert!(matches!(input.read(1), Err(FileError::InputChanged { line: 2, .. })));
}

#[test]
fn bounds_of_an_input_are_told_by_code_and_line() {
    let text = [request("a"), request("b"), request("c")].concat();
    let codes = |bounds: &InputBounds| match Input::check(file(&text).path(), bounds) {
        Err(FileError::Input { problems, .. }) => problems.first.iter().map(|problem| (problem.line, problem.code)).collect(),
        Ok(_) => Vec::new(),
        Err(other) => panic!("{other}"),
    };
    let endpoint = |url: &str| InputBounds { endpoint: Some(url.to_owned()), ..InputBounds::default() };
    assert_eq!(codes(&endpoint("/v1/completions")), []);
    assert_eq!(codes(&endpoint("/v1/embeddings")), [1, 2, 3].map(|line| (line, "mismatched_endpoint")));
    assert_eq!(codes(&InputBounds { requests: 2, ..InputBounds::default() }), [(3, "too_many_requests")]);
    assert_eq!(codes(&InputBounds { body_bytes: 4, ..InputBounds::default() }), [1, 2, 3].map(|line| (line, "body_too_long")));
}

#[test]
fn a_problem_repeats_no_long_text_of_the_input() {
    let long = "x".repeat(100_000);
    for wrong in [
        format!("{{\"custom_id\":\"a\",\"method\":\"{long}\"}}"),
        format!("{{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"{long}\",\"body\":{{}}}}"),
        format!("{{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/x\",\"body\":{{\"stream\":\"{long}\"}}}}"),
        format!("{0}\n{0}", request(&long).trim_end()),
    ] {
        let message = problems(&wrong);
        assert!(message.len() < 1000, "{} bytes", message.len());
    }
}
