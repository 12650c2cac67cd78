use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Line {
    #[command(subcommand)]
    command: Keys,
}

fn created(arguments: &[&str]) -> CreateKeyArgs {
    match Line::try_parse_from([&["keys", "create"], arguments].concat()).unwrap().command {
        Keys::Create(args) => *args,
        other => panic!("{other:?}"),
    }
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn key(arguments: &[&str]) -> KeyEntry {
    entry(&created(arguments), &Secret::random().unwrap(), at(1000))
}

#[test]
fn command_line_flags_set_every_field_of_a_key() {
    let all = "--name n --tenant t --role admin --model base --model poet --expires 90d --in-flight 1 --requests-per-minute 2 \
               --input-per-minute 3 --input-per-day 4 --output-per-minute 5 --output-per-day 6 --weight 0.5";
    let key = key(&all.split_whitespace().collect::<Vec<_>>());
    assert_eq!((key.name.as_str(), key.tenant.as_str(), key.role), ("n", "t", Role::Admin));
    assert_eq!(key.models.as_deref(), Some(&["base".to_owned(), "poet".to_owned()][..]));
    assert_eq!((key.created, key.expires), (Timestamp::of(at(1000)), Some(Timestamp::of(at(1000 + 90 * 86_400)))));
    let limits = KeyLimits {
        in_flight: Some(1),
        requests_per_minute: Some(2),
        input_per_minute: Some(3),
        input_per_day: Some(4),
        output_per_minute: Some(5),
        output_per_day: Some(6),
        weight: Some(0.5),
    };
    assert_eq!(key.limits, limits);
}

#[test]
fn a_key_without_arguments_is_a_tenant_of_its_own() {
    let anonymous = key(&[]);
    assert_eq!((anonymous.tenant.as_str(), anonymous.role, anonymous.models.as_ref()), (anonymous.id.as_str(), Role::Use, None));
    assert!(anonymous.limits.is_empty() && anonymous.expires.is_none());
    let (first, second) = (key(&["--name", "team"]), key(&["--name", "team"]));
    assert_eq!((first.tenant.as_str(), second.tenant.as_str()), ("team", "team"));
    assert_ne!(first.id, second.id);
}

#[test]
fn a_revocation_is_only_ever_brought_forward() {
    let mut keys = [key(&["--name", "a"]), key(&["--name", "b"])];
    let id = keys[0].id.clone();
    let mut revoke =
        |now, after| revoke(&mut keys, &id, at(now), Duration::from_secs(after)).map(|message| (message, keys[0].revoked, keys[1].revoked));
    let day = 86_400;
    assert_eq!(
        revoke(2000, day).unwrap(),
        (format!("{id} is valid until 1970-01-02T00:33:20Z"), Some(Timestamp::of(at(2000 + day))), None)
    );
    assert_eq!(revoke(2000, 2 * day).unwrap().1, Some(Timestamp::of(at(2000 + day))));
    assert_eq!(revoke(3000, 0).unwrap(), (format!("{id} is revoked"), Some(Timestamp::of(at(3000))), None));
    assert_eq!(
        revoke(4000, day).unwrap(),
        (format!("{id} was revoked before, from 1970-01-01T00:50:00Z on"), Some(Timestamp::of(at(3000))), None)
    );
}

#[test]
fn a_wrong_key_id_lists_valid_ones_without_secrets() {
    let mut keys = [key(&["--name", "team"]), key(&["--name", "team"])];
    let mut refused = |id: &str| revoke(&mut keys, id, at(0), Duration::ZERO).unwrap_err();
    let secret = Secret::random().unwrap();
    let words = refused(secret.reveal());
    assert!(words.contains(secret.id()) && !words.contains(secret.reveal()), "{words}");
    assert!(refused("nobody").contains("`hostler keys list`"));
    assert!(refused("").contains("no key has the id"));
    let words = refused("team");
    assert!(keys.iter().all(|key| words.contains(&key.id)), "{words}");
}

#[test]
fn the_key_list_shows_states_and_no_secrets() {
    let valid = key(&["--name", "alice", "--in-flight", "4", "--input-per-day", "100", "--model", "m1", "--model", "m2"]);
    let leaving = KeyEntry { revoked: Some(Timestamp::of(at(5000))), expires: Some(Timestamp::of(at(9000))), ..key(&["--role", "admin"]) };
    let expired = KeyEntry { expires: Some(Timestamp::of(at(1500))), ..key(&[]) };
    let revoked = KeyEntry { revoked: Some(Timestamp::of(at(1500))), ..key(&[]) };
    let keys = [valid, leaving, expired, revoked];
    let lines: Vec<String> = lines(&keys, at(2000)).iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert!(
        lines[1].contains("alice") && lines[1].contains("use") && lines[1].contains(" valid m1 m2 in-flight=4 input-per-day=100"),
        "{lines:#?}"
    );
    assert!(lines[2].contains("admin") && lines[2].ends_with("valid until 1970-01-01T01:23:20Z all"), "{lines:#?}");
    assert!(lines[3].contains("expired") && lines[4].contains("revoked"), "{lines:#?}");
    let json = json(&keys, at(2000));
    assert_eq!(json["keys"][0]["limits"], serde_json::json!({"in_flight": 4, "input_per_day": 100}));
    assert_eq!([0, 1, 2, 3].map(|index| json["keys"][index]["state"].as_str().unwrap()), ["valid", "valid", "expired", "revoked"]);
    for key in &keys {
        let digest = String::from(key.sha256);
        assert!(!json.to_string().contains(&digest) && !lines.concat().contains(&digest));
    }
    assert!(super::lines(&[], at(0))[0].contains("hostler keys create"));
}
