use proptest::prelude::*;

use super::*;

const TYPE: &str = "multipart/form-data; boundary=----b";

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (disposition, value) in parts {
        body += &format!("------b\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{value}\r\n");
    }
    (body + "------b--\r\n").into_bytes()
}

fn model(parts: &[(&str, &str)]) -> Result<Option<String>, Odd> {
    peek(TYPE, &form(parts)).map(|peek| peek.model)
}

#[test]
fn the_model_is_found_before_and_after_a_file() {
    let file = ("name=\"file\"; filename=\"a; name.wav\"", "RIFF\r\n\r\n--b\r\nname=\"model\"");
    for parts in [[("name=\"model\"", "whisper"), file], [file, ("name=\"model\"", "whisper")]] {
        assert_eq!(model(&parts), Ok(Some("whisper".into())));
    }
    assert_eq!(model(&[file]), Ok(None));
    let streamed = form(&[("name=\"stream\"", "True"), ("name=\"model\"", "m\u{fc}")]);
    let peeked = peek("Multipart/Form-Data; charset=utf-8; Boundary=\"----b\"", &streamed).unwrap();
    assert_eq!((peeked.stream, peeked.model), (true, Some("mü".into())));
}

#[test]
fn a_form_that_two_readers_could_read_in_two_ways_is_refused() {
    assert_eq!(model(&[("name=\"model\"", "a"), ("name=\"model\"", "b")]), Err(Odd::Twice("model")));
    for odd in [
        "name=model",
        "name*=utf-8''model",
        "name=\"mo\\del\"",
        "name=\"x\"; name*=utf-8''model",
        "name=\"x\"; name=\"model\"",
        "filename=\"x\"",
    ] {
        assert_eq!(model(&[(odd, "a")]), Err(Odd::NoName), "{odd}");
    }
    assert_eq!(peek("multipart/form-data", b""), Err(Odd::NoBoundary));
}

#[test]
fn a_form_that_ends_early_still_names_its_model() {
    let whole = form(&[("name=\"model\"", "whisper"), ("name=\"file\"; filename=\"a\"", "RIFF")]);
    assert_eq!(peek(TYPE, &whole[..whole.len() - 12]).unwrap().model, Some("whisper".into()));
    assert_eq!(peek(TYPE, b"no form").unwrap(), Peek::default());
}

proptest! {
    #[test]
    fn reading_a_form_never_panics(bytes: Vec<u8>, prefix in "(------b\r\n)?(Content-Disposition: form-data; name=\"[a-z*;=\" ]{0,9})?") {
        let body = [prefix.as_bytes(), &bytes].concat();
        let _ = peek(TYPE, &body);
    }
}
