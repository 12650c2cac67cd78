use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use serde_json::Value;

use super::super::peek::{Peek, peek};
use super::*;

fn isolation() -> Isolation {
    Isolation { secret: vec![7; 32] }
}

fn salted(tenant: &str, body: &str) -> Result<Option<SaltedBody>, String> {
    salted_as("application/json; charset=utf-8", "/v1/chat/completions", tenant, body)
}

fn salted_as(content_type: &str, path: &str, tenant: &str, body: &str) -> Result<Option<SaltedBody>, String> {
    let body = Bytes::copy_from_slice(body.as_bytes());
    let peek = peek(&body).unwrap_or_default();
    isolation().add_salt(&UnsaltedRequest {
        tenant,
        route: Route::of(path),
        content: BodyFormat::from_content_type(content_type),
        body: &body,
        peek: &peek,
    })
}

/// RFC 4231, cases 1 to 4, 6 and 7: with a key shorter than a block, as long as the hash, and
/// longer than a block.
#[test]
fn the_hmac_matches_the_standard() {
    let long = [0xaa; 131];
    let counted: Vec<u8> = (1..=25).collect();
    for (key, message, expected) in [
        (&[0x0b; 20][..], &b"Hi There"[..], "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (&[0xaa; 20], &[0xdd; 50], "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        (&counted, &[0xcd; 50], "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
        (
            &long,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
        (
            &long,
            b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed before being used by the HMAC algorithm.",
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
        ),
    ] {
        assert_eq!(hex(&hmac(key, &[message])), expected);
        let (left, right) = message.split_at(message.len() / 2);
        assert_eq!(hex(&hmac(key, &[left, right])), expected, "in parts");
    }
}

#[test]
fn a_salt_depends_on_tenant_and_own_salt() {
    let isolation = isolation();
    let salts = [
        isolation.salt("a", ""),
        isolation.salt("b", ""),
        isolation.salt("", ""),
        isolation.salt("a", "b"),
        isolation.salt("ab", ""),
        isolation.salt("", "ab"),
        Isolation { secret: vec![8; 32] }.salt("a", ""),
    ];
    for (index, salt) in salts.iter().enumerate() {
        // vLLM accepts at most 128 characters, without `@`, `/` and `\`.
        assert!(salt.len() == 64 && salt.bytes().all(|byte| byte.is_ascii_hexdigit()), "{salt}");
        assert!(!salts[..index].contains(salt), "{index}");
    }
    assert_eq!(isolation.salt("a", "b"), isolation.salt("a", "b"));
    assert_eq!(format!("{isolation:?}"), "Isolation");
}

#[test]
fn a_salt_is_inserted_once_and_nothing_else_changes() {
    let salt = isolation().salt("t", "");
    for (body, expected) in [
        (r#"{}"#, format!(r#"{{"cache_salt":"{salt}"}}"#)),
        (" { \n} \n", format!(r#" {{"cache_salt":"{salt}"}}"#)),
        (r#"{"a":{"cache_salt":"inner"} } "#, format!(r#"{{"a":{{"cache_salt":"inner"}},"cache_salt":"{salt}"}}"#)),
        (r#"{"cache_salt" : null,"a":1}"#, format!(r#"{{"cache_salt" : "{salt}","a":1}}"#)),
    ] {
        let salted = salted("t", body).unwrap().unwrap();
        assert_eq!((std::str::from_utf8(&salted.body).unwrap(), &salted.salt), (&*expected, &salt));
    }
}

#[test]
fn a_client_cannot_keep_its_own_salt_under_any_spelling() {
    let own = isolation().salt("t", "mine");
    for body in [
        r#"{"cache_salt":"mine"}"#,
        r#"{"cache_salt":"other","cache_salt":"mine"}"#,
        r#"{"cache\u005fsalt":"m\u0069ne","x":"}","cache_salt":"mine"}"#,
        r#"{"cache_salt":7,"cache_salt":"mine"}"#,
    ] {
        let salted = salted("t", body).unwrap().unwrap();
        assert_eq!(salted.salt, own, "{body}");
        let text = std::str::from_utf8(&salted.body).unwrap();
        assert!(
            !text.contains("mine") && !text.contains("other") && text.matches(&own).count() == peek(&salted.body).unwrap().raw_salts.len()
        );
        assert_eq!(serde_json::from_str::<Value>(text).unwrap()["cache_salt"], *own);
    }
    let victim = isolation().salt("victim", "");
    let stolen = salted("t", &format!(r#"{{"cache_salt":"{victim}"}}"#)).unwrap().unwrap();
    assert!(stolen.salt != victim && memchr::memmem::find(&stolen.body, victim.as_bytes()).is_none());
    for wrong in [r#"{"cache_salt":7}"#, r#"{"cache_salt":""}"#, r#"{"cache_salt":"mine","cache_salt":{}}"#] {
        assert_eq!(salted("t", wrong).unwrap_err(), "cache_salt is a string that is not empty");
    }
}

#[test]
fn bodies_that_cannot_be_salted_are_refused() {
    let chat = "/v1/chat/completions";
    assert!(salted_as("text/plain", chat, "t", "{}").unwrap_err().contains("content type application/json"));
    // Salts are added under any content type that an engine may read as JSON.
    for json in ["", "application/vnd.api+json"] {
        assert!(salted_as(json, chat, "t", "{}").unwrap().is_some(), "{json}");
    }
    assert!(salted_as("application/json", "/v2/embed", "t", "{}").unwrap_err().ends_with("use /v1/embeddings"));
    assert!(salted_as("application/json", "/cohere/v2/chat", "t", "{}").unwrap_err().ends_with("use /v1/chat/completions"));
    assert!(salted_as("Application/JSON", chat, "t", "{}").unwrap().is_some());
    assert!(salted_as("multipart/form-data; boundary=x", "/v1/audio/transcriptions", "t", "--x").unwrap().is_none());
    let (audio, body) = ("/v1/audio/transcriptions", Bytes::from_static(b"--x"));
    let spoken = Peek { prompt_field: Some("prompt".into()), ..Peek::default() };
    let form = UnsaltedRequest {
        tenant: "t",
        route: Route::of(audio),
        content: BodyFormat::Form("multipart/form-data; boundary=x"),
        body: &body,
        peek: &spoken,
    };
    assert!(isolation().add_salt(&form).unwrap_err().contains("the field `prompt` of a form"));
    assert!(salted_as("application/json", chat, "t", "[1]").unwrap().is_none());
    assert!(salted_as("", "/v1/responses/x", "t", "").unwrap().is_none());
}

#[test]
fn the_secret_is_created_once_and_readable_by_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state/router.secret");
    let first = Isolation::open(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(Isolation::open(&path).unwrap().secret, first.secret);
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
    // If another router was as fast, its secret stays.
    create_secret(&path).unwrap();
    assert_eq!(Isolation::open(&path).unwrap().secret, first.secret);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(Isolation::open(&path).unwrap_err().to_string().contains("chmod 600"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&path, "short\n").unwrap();
    assert!(Isolation::open(&path).unwrap_err().to_string().contains("at least 32 characters"));
    assert!(Isolation::open("".as_ref()).unwrap_err().to_string().contains("router.secret_file"));
}

/// A JSON value of strings that may look like the field itself.
fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![Just(Value::Null), any::<i32>().prop_map(Value::from), "[a-z\"{}\\\\ü,:]{0,12}".prop_map(Value::from)];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map("[a-z_\"]{0,6}|cache_salt", inner, 0..4).prop_map(|map| map.into_iter().collect::<Value>()),
        ]
    })
}

proptest! {
    #[test]
    fn salting_any_body_changes_only_the_salt(
        fields in prop::collection::vec(("[a-z]{1,6}|prompt|messages|input|system", json()), 0..6),
        own in prop::option::of("[a-z\"\\\\]{1,9}"), at in 0..6usize, pretty: bool, space in "[ \n\t]{0,3}",
    ) {
        let mut body: serde_json::Map<String, Value> = fields.into_iter().collect();
        body.remove("cache_salt");
        if let Some(own) = &own {
            body.shift_insert(at.min(body.len()), "cache_salt".into(), own.clone().into());
        }
        let mut expected = Value::Object(body);
        let text = if pretty { format!("{expected:#}") } else { expected.to_string() };
        let old = Bytes::from(format!("{space}{text}{space}"));
        let before = peek(&old).unwrap();
        let plain = UnsaltedRequest { tenant: "t", route: Route::Completions, content: BodyFormat::Json, body: &old, peek: &before };
        let salted = isolation().add_salt(&plain).unwrap().unwrap();
        expected["cache_salt"] = isolation().salt("t", own.as_deref().unwrap_or_default()).into();
        prop_assert_eq!(&serde_json::from_slice::<Value>(&salted.body).unwrap(), &expected);
        let after = peek(&salted.body).unwrap();
        prop_assert_eq!(after.salt.as_deref(), Some(&*salted.salt));
        // The prompt is found at its new place, so the router's block keys belong to the same text.
        prop_assert_eq!(before.prompt_parts.len(), after.prompt_parts.len());
        for (old_part, new_part) in before.prompt_parts.iter().zip(&after.prompt_parts) {
            let found = salted.relocate(old_part);
            prop_assert_eq!(&salted.body[found.clone()], &old[old_part.clone()]);
            prop_assert_eq!(&found, new_part);
        }
    }
}
