//! Forms in pieces of every size.

use proptest::prelude::*;

use super::*;

const TYPE: &str = "multipart/form-data; boundary=XY";

/// Name, file's name and content of a part.
type ReadPart = (String, Option<String>, Vec<u8>);

/// The parts of a form that comes in pieces of this size.
fn read(form: &[u8], piece: usize) -> Result<Vec<ReadPart>, UploadFormError> {
    let mut reader = FormReader::new(TYPE)?;
    let mut parts = Vec::new();
    for bytes in form.chunks(piece.max(1)) {
        reader.push(bytes);
        while let Some(event) = reader.next()? {
            match event {
                FormEvent::Part { name, filename } => parts.push((name, filename, Vec::new())),
                FormEvent::Data(data) => parts.last_mut().unwrap().2.extend_from_slice(&data),
                FormEvent::PartEnd => {}
            }
        }
    }
    reader.check_end().map(|()| parts)
}

fn form(content: &[u8]) -> Vec<u8> {
    let before = b"--XY\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XY\r\n\
        Content-Disposition: form-data; name=\"file\"; filename=\"a;\\\"b.jsonl\"\r\nContent-Type: application/json\r\n\r\n";
    [&before[..], content, b"\r\n--XY--\r\n"].concat()
}

proptest! {
    #[test]
    fn a_form_is_read_the_same_in_pieces_of_any_size(content in "([\r\n-]|XY|--XY|\r\n--X|a){0,30}", piece in 1_usize..80) {
        prop_assume!(!format!("{content}\r\n").contains("\r\n--XY"));
        let parts = read(&form(content.as_bytes()), piece).unwrap();
        let expected = [
            ("purpose".to_owned(), None, b"batch".to_vec()),
            ("file".to_owned(), Some("a;\"b.jsonl".to_owned()), content.into_bytes()),
        ];
        prop_assert_eq!(parts, expected);
    }

    #[test]
    fn no_bytes_make_the_form_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
        let _ = read(&bytes, piece);
        let _ = read(&[b"--XY\r\n", &bytes[..]].concat(), piece);
    }
}

#[test]
fn a_broken_form_is_refused() {
    let whole = form(b"x");
    for end in 0..whole.len() - 4 {
        assert!(read(&whole[..end], 7).is_err(), "{end} bytes");
    }
    let many = [&b"--XY\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n".repeat(MAX_PARTS + 1)[..], b"--XY--"].concat();
    let endless = [b"--XY\r\n", &[b'a'; 2 * MAX_HEADER_BYTES][..]].concat();
    for (odd, error) in [
        (&many[..], UploadFormError::TooMany),
        (&endless, UploadFormError::Broken),
        (b"hello", UploadFormError::Broken),
        (b"--XYZ\r\n", UploadFormError::Broken),
        (b"--XY\r\nContent-Type: a\r\n\r\n", UploadFormError::Broken),
    ] {
        assert_eq!(read(odd, 100), Err(error));
    }
    for kind in ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=a\u{e9}"] {
        assert_eq!(FormReader::new(kind).unwrap_err(), UploadFormError::NoForm, "{kind}");
    }
    assert!(FormReader::new("Multipart/Form-Data; charset=utf-8; Boundary=\"a b\"").is_ok());
}
