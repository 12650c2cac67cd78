use proptest::prelude::*;

use super::*;

const TYPE: &str = "multipart/form-data; boundary=----b";
const NAMED: &str = "Content-Disposition: form-data; ";

/// A form of parts with these headers, each after `Content-Disposition: form-data; `.
fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (disposition, value) in parts {
        body += &format!("------b\r\n{NAMED}{disposition}\r\n\r\n{value}\r\n");
    }
    (body + "------b--\r\n").into_bytes()
}

fn model(parts: &[(&str, &str)]) -> Result<Option<String>, FormError> {
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
    assert_eq!((peeked.is_stream, peeked.model), (true, Some("mü".into())));
}

#[test]
fn a_form_is_read_as_clients_write_it() {
    for written in [
        // Headers as .NET, OkHttp and Apache's HttpClient write them.
        "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
        "Content-Disposition: form-data; name=\"model\"\r\nContent-Length: 1",
        "Content-Disposition: form-data; name=\"model\"\r\nContent-Type: text/plain; charset=ISO-8859-1\r\nContent-Transfer-Encoding: 8bit",
        "content-disposition:form-data;name=\"model\"",
    ] {
        for (begin, end) in [("", "\r\n"), ("\r\n", ""), ("", "\r\n\r\n"), ("", "\r\n\r\n\r\n")] {
            let body = format!("{begin}------b\r\n{written}\r\n\r\nm\r\n------b--{end}");
            assert_eq!(peek(TYPE, body.as_bytes()).map(|peek| peek.model), Ok(Some("m".into())), "{body}");
        }
    }
    for file in ["filename=a.wav; filename*=utf-8''a.wav", "filename=\"a\\\"b.wav\"", "filename=\"C:\\a.wav\"", "filename=\"ü; x=y\""] {
        let parts = [("name=\"model\"", "m"), (&*format!("name=\"file\"; {file}"), "RIFF")];
        assert_eq!(model(&parts), Ok(Some("m".into())), "{file}");
    }
    assert_eq!(model(&[]), Ok(None));
}

#[test]
fn a_field_name_must_match_exactly() {
    assert_eq!(model(&[("name=\"MODEL\"", "a"), ("name=\"model[]\"", "b")]), Ok(None));
    assert_eq!(model(&[("name=\"MODEL\"", "a"), ("name=\"model\"", "b")]), Ok(Some("b".into())));
    for odd in [
        "NAME=\"model\"",
        "name*=utf-8''model",
        "name=\"mo\\del\"",
        "name=\"mod%65l\"",
        "name=\"x\"; name*=utf-8''model",
        "name=\"x\"; name=\"model\"",
        "name=\"x\"; NAME = \"model\"",
        "name=\"x\"; name",
        "name=\"x\"; filename=\"a\\\\\"; name=\"model\"",
        "name=\"x\"; filename=\"a; name=model\"",
        "filename=\"name=model\"; name=\"x\"",
        "filename=\"x\"",
        "name=\"model",
        "name=model\"",
        "name = \"model\"",
        "name=\"\"",
        "name=\"m\u{fc}\"",
        "",
    ] {
        assert_eq!(model(&[(odd, "a")]), Err(FormError::NoName), "{odd}");
    }
}

#[test]
fn a_field_that_may_become_a_prompt_is_noticed() {
    let words = |parts: &[(&str, &str)]| peek(TYPE, &form(parts)).unwrap().prompt_field;
    let sound = ("name=\"file\"; filename=\"a.wav\"", "prompt");
    let settings = [sound, ("name=\"model\"", "m"), ("name=\"temperature\"", "0"), ("name=\"timestamp_granularities[]\"", "word")];
    assert_eq!(words(&settings), None);
    assert_eq!(words(&[("name=\"prompt\"", "")]), None);
    for field in ["prompt", "hotwords", "vllm_xargs", "Model", "unheard_of"] {
        assert_eq!(words(&[sound, (&format!("name=\"{field}\""), "x"), ("name=\"prompt\"", "y")]), Some(field.into()));
    }
}

#[test]
fn an_ambiguous_part_is_refused() {
    for head in [
        "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"x\"\r\n ; name=\"model\"",
        "Content-Disposition : form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"model\"\nX: y",
        "Content-Disposition: form-data; name=\"model\"\rX: y",
        "Content-Disposition: form-data; name=\"model\"\0",
        "Content-Disposition: attachment; name=\"model\"",
        "X: y",
        "nonsense",
    ] {
        let body = format!("------b\r\n{head}\r\n\r\nm\r\n------b--\r\n");
        assert_eq!(peek(TYPE, body.as_bytes()), Err(FormError::NoName), "{head}");
    }
    assert_eq!(peek(TYPE, b"------b\r\n\r\nm\r\n------b--\r\n"), Err(FormError::NoName), "no header");
    assert_eq!(model(&[("name=\"model\"", "a"), ("name=\"model\"", "b")]), Err(FormError::DuplicateField("model")));
    assert_eq!(model(&[("name=\"model\"; filename=\"a\"", "a")]), Err(FormError::ModelNotText));
    for more in [
        "Content-Transfer-Encoding: base64",
        "Content-Type: text/plain; charset=utf-16",
        "Content-Type: text/plain; charset=utf-8; charset=cp037",
        "Content-Type: text/plain; charset*=utf-7''x",
    ] {
        let body = format!("------b\r\n{NAMED}name=\"model\"\r\n{more}\r\n\r\nm\r\n------b--\r\n");
        assert_eq!(peek(TYPE, body.as_bytes()), Err(FormError::ModelNotText), "{more}");
    }
    let latin = format!("------b\r\n{NAMED}name=\"model\"\r\nContent-Type: text/plain; charset=iso-8859-1\r\n\r\n\u{fc}\r\n------b--\r\n");
    assert_eq!(peek(TYPE, latin.as_bytes()), Err(FormError::ModelNotText));
    assert_eq!(model(&[("name=\"model\"", &"m".repeat(2000))]), Err(FormError::ModelNotText));
}

#[test]
fn a_form_with_ambiguous_part_borders_is_refused() {
    let whole = String::from_utf8(form(&[("name=\"model\"", "a"), ("name=\"x\"", "b")])).unwrap();
    assert!(peek(TYPE, whole.as_bytes()).is_ok());
    let second = format!("\r\n------b\r\n{NAMED}name=\"x\"");
    for (what, broken) in [
        ("no beginning", whole.replacen("------b\r\n", "", 1)),
        ("a line feed first", format!("\n{whole}")),
        ("words first", format!("words\r\n{whole}")),
        ("two lines first", format!("\r\n\r\n{whole}")),
        ("a blank behind the boundary", whole.replace(&second, &second.replace("b\r\n", "b \r\n"))),
        ("another letter behind it", whole.replace(&second, &second.replace("b\r\n", "bc\r\n"))),
        ("a line feed before it", whole.replace(&second, &second.replacen("\r\n", "\n", 1))),
        ("a carriage return before it", whole.replace(&second, &second.replacen("\r\n", "\r", 1))),
        ("a line feed behind it", whole.replace(&second, &second.replace("b\r\n", "b\n"))),
        ("within a value", whole.replace("\r\nb\r\n", "\r\nb------b\r\n")),
        ("words behind the end", format!("{whole}x")),
        ("words behind an empty line", format!("{whole}\r\nx")),
        ("a line feed behind the end", format!("{whole}\n")),
        ("half a line end behind the end", format!("{whole}\r")),
        ("a blank behind the end", format!("{whole} \r\n")),
        ("another form behind an empty line", format!("{whole}\r\n{whole}")),
        ("another form behind the end", whole.repeat(2)),
        ("no end", whole[..whole.len() - "--\r\n".len()].to_owned()),
        ("nothing", String::new()),
    ] {
        assert_eq!(peek(TYPE, broken.as_bytes()), Err(FormError::Incomplete), "{what}: {broken}");
    }
    let without_a_value = whole.replace("\r\n\r\nb\r\n", "\r\n\r\n");
    assert!(without_a_value != whole && peek(TYPE, without_a_value.as_bytes()) == Err(FormError::NoName));
}

#[test]
fn a_form_has_at_most_a_thousand_parts() {
    let parts = |count| form(&vec![("name=\"timestamp_granularities[]\"", "word"); count]);
    assert!(peek(TYPE, &parts(1000)).is_ok());
    assert_eq!(peek(TYPE, &parts(1001)), Err(FormError::TooMany));
}

#[test]
fn a_field_chosen_from_a_list_is_no_prompt() {
    let words = |name: &str| peek(TYPE, &form(&[(&format!("name=\"{name}\""), "de")])).unwrap().prompt_field;
    assert_eq!([words("language"), words("to_language")], [None, None]);
    assert_eq!(words("hotwords"), Some("hotwords".into()));
}

#[test]
fn an_ambiguous_boundary_is_refused() {
    let body = form(&[("name=\"model\"", "m")]);
    assert!(peek("multipart/form-data ;boundary=----b;charset=\"UTF-8\"", &body).is_ok());
    let long = format!("multipart/form-data; boundary={}", "b".repeat(71));
    for odd in [
        "multipart/form-data",
        "multipart/form-data;",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; boundary=----b;",
        "multipart/form-data; boundary=----b; boundary=----b",
        "multipart/form-data; boundary=----b; BOUNDARY=x",
        "multipart/form-data; boundary*=utf-8''----b",
        "multipart/form-data; boundary*0=--; boundary*1=--b",
        "multipart/form-data; boundary=----b; boundary*=utf-8''x",
        "multipart/form-data; boundary = ----b",
        "multipart/form-data; boundary=\"----b",
        "multipart/form-data; boundary=----b\"",
        "multipart/form-data; boundary=\"--\\--b\"",
        "multipart/form-data; boundary=\"----b; x\"",
        "multipart/form-data; x=\"; boundary=----b",
        "multipart/form-data; boundary=----b x",
        "multipart/form-data; boundary=----b, text/plain",
        "multipart/form-data; charset=cp037; boundary=----b",
        "multipart/form-data; charset=utf-7; boundary=----b",
        "multipart/form-data, text/plain; boundary=----b",
        "multipart/form-datax; boundary=----b",
        &long,
    ] {
        assert_eq!(peek(odd, &body), Err(FormError::Boundary), "{odd}");
    }
    // An apostrophe is part of the boundary.
    assert_eq!(peek("multipart/form-data; boundary='----b'", &body), Err(FormError::Incomplete));
}

proptest! {
    #[test]
    fn no_form_makes_the_parser_panic(bytes: Vec<u8>, prefix in "(------b\r\n)?(Content-Disposition: form-data; name=\"[a-z*;=\" ]{0,9})?") {
        let body = [prefix.as_bytes(), &bytes].concat();
        let _ = peek(TYPE, &body);
    }

    #[test]
    fn a_truncated_form_is_refused(values in prop::collection::vec("[ -~\r\n]{0,12}", 1..4), cut in 1..200usize) {
        let parts: Vec<(&str, &str)> = values.iter().map(|value| ("name=\"x\"", value.as_str())).collect();
        let whole = form(&parts);
        prop_assert!(peek(TYPE, &whole).is_ok());
        let left = whole.len().saturating_sub(cut);
        prop_assert_eq!(peek(TYPE, &whole[..left]).is_ok(), cut == 2);
    }
}
