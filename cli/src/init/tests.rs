//! Output of `hostler token list`.

use super::*;

#[test]
fn the_token_list_says_which_tokens_still_admit_nodes() {
    let record = |id: &str, expires: u64, uses: u32, by: &[&str], revoked: bool| TokenInfo {
        id: id.into(),
        expires,
        job: String::new(),
        node: if id == "c" { "n2".into() } else { String::new() },
        uses,
        used_by: by.iter().map(|node| (*node).to_owned()).collect(),
        revoked,
    };
    let records = [
        record("a", 2000, 2, &["n1"], false),
        record("b", 2000, 1, &["n1"], false),
        record("c", 2000, 1, &[], true),
        record("d", 1000, 0, &[], false),
    ];
    insta::assert_snapshot!(lines(&records, 1000).join("\n"), @r"
    TOKEN  STATE    EXPIRES               JOB  NODE  USED         BY
    a      good     1970-01-01T00:33:20Z             1/2          n1
    b      used up  1970-01-01T00:33:20Z             1/1          n1
    c      revoked  1970-01-01T00:33:20Z       n2    0/1
    d      expired  1970-01-01T00:16:40Z             not counted
    ");
}

#[test]
fn token_uses_are_a_number_or_unlimited() {
    assert!(matches!("3".parse(), Ok(UsesArg(UseLimit::Count(3)))));
    assert!(matches!("unlimited".parse(), Ok(UsesArg(UseLimit::EveryNodeOfItsJob))));
    assert!("many".parse::<UsesArg>().is_err());
}
