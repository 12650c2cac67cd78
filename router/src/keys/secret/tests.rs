use proptest::prelude::*;

use super::*;

#[test]
fn generated_keys_differ_and_parse_back() {
    let keys: Vec<Secret> = (0..200).map(|_| Secret::random().unwrap()).collect();
    for key in &keys {
        assert_eq!(key.reveal().parse(), Ok(key.clone()));
        assert_eq!(find_key_id(key.reveal()), Some(key.id()));
        assert_eq!(key.reveal().len(), 66);
    }
    let ids: std::collections::HashSet<&str> = keys.iter().map(Secret::id).collect();
    assert_eq!(ids.len(), keys.len());
    // Each letter comes about 390 times among 12,400; fewer than 200 has a chance below 10⁻²⁰.
    let text: String = keys.iter().map(|key| key.reveal().replace(['_', 'h'], "")).collect();
    for letter in ALPHABET.iter().filter(|letter| **letter != b'h') {
        assert!(text.bytes().filter(|other| other == letter).count() > 200, "{}", char::from(*letter));
    }
}

#[test]
fn a_text_that_is_no_key_is_refused() {
    let key = Secret::random().unwrap();
    let text = key.reveal();
    let wrong = [
        String::new(),
        "hk_".into(),
        "sk-proj-abcdefghijklmnop".into(),
        text.to_uppercase(),
        text[1..].into(),
        text[..text.len() - 1].into(),
        format!("{text}a"),
        format!("{text} "),
        text.replace("hk_", "hk_\u{e9}"),
        text.replacen('_', "-", 1),
    ];
    for wrong in wrong {
        assert_eq!(wrong.parse::<Secret>(), Err(InvalidKey), "{wrong:?}");
    }
}

#[test]
fn keys_and_digests_are_never_printed() {
    let key = Secret::random().unwrap();
    let secret = key.reveal().rsplit('_').next().unwrap();
    let digest = String::from(key.digest());
    for printed in [format!("{key:?}"), format!("{:#?}", Some(&key)), format!("{:?}", key.digest())] {
        assert!(!printed.contains(secret) && !printed.contains(&digest), "{printed}");
    }
}

#[test]
fn a_digest_is_the_sha_256_of_the_whole_key() {
    // printf %s hk_aaaaaaaaaa_aaaa... | sha256sum
    let key: Secret = format!("hk_{}_{}", "a".repeat(10), "a".repeat(52)).parse().unwrap();
    assert_eq!(String::from(key.digest()), EXPECTED);
}

/// The output of coreutils' `sha256sum`.
const EXPECTED: &str = "ed8e9659f4eebfb87205796592ccb877d6fd6029da1d46cc7479540d659c47ea";

proptest! {
    #[test]
    fn digests_match_only_if_all_bytes_do(left: [u8; 32], place in 0_usize..32, bit in 0_u32..8) {
        let mut right = left;
        prop_assert!(Digest(left).matches(&Digest(right)));
        right[place] ^= 1 << bit;
        prop_assert!(!Digest(left).matches(&Digest(right)));
    }

    #[test]
    fn digests_are_read_back_as_they_are_written(bytes: [u8; 32]) {
        let text = String::from(Digest(bytes));
        prop_assert!(Digest::try_from(text.clone()).unwrap().matches(&Digest(bytes)));
        prop_assert!(Digest::try_from(text[1..].to_owned()).is_err());
    }

    #[test]
    fn any_text_is_parsed_as_a_key_or_refused(text in "(hk_)?[a-z2-7_\u{e9}]{0,80}") {
        let _ = text.parse::<Secret>();
        let _ = find_key_id(&text);
        let _ = Digest::try_from(text);
    }
}
