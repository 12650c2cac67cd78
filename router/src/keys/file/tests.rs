use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::keys::Secret;

fn entry(name: &str) -> KeyEntry {
    let secret = Secret::random().unwrap();
    KeyEntry { name: name.to_owned(), ..KeyEntry::new(&secret, "t", SystemTime::now()) }
}

fn names(entries: &[KeyEntry]) -> Vec<&str> {
    entries.iter().map(|entry| entry.name.as_str()).collect()
}

fn add(path: &Path, name: &str) -> Result<(), KeyFileError> {
    change(path, true, |entries| {
        entries.push(entry(name));
        Ok(())
    })
}

#[test]
fn a_changed_key_file_is_private_and_keeps_other_keys() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("deep/keys.toml");
    add(&path, "first").unwrap();
    add(&path, "second").unwrap();
    assert_eq!(names(&list(&path).unwrap()), ["first", "second"]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, ["keys.toml"]);
    assert!(std::fs::read_to_string(&path).unwrap().starts_with(FILE_HEADER));
}

#[test]
fn a_refused_change_leaves_the_key_file_alone() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    add(&path, "first").unwrap();
    let before = std::fs::read(&path).unwrap();
    let refused = change::<()>(&path, false, |entries| {
        entries.clear();
        Err("no".into())
    });
    assert_eq!(refused.unwrap_err().to_string(), "no");
    let unsound = change(&path, false, |entries| {
        entries.push(KeyEntry { models: Some(vec![]), ..entry("second") });
        Ok(())
    });
    assert!(unsound.unwrap_err().to_string().contains("leave `models` out"));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn concurrent_changes_of_the_key_file_are_all_kept() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    std::thread::scope(|scope| {
        for writer in 0..8 {
            let path = &path;
            scope.spawn(move || (0..5).for_each(|turn| add(path, &format!("{writer}-{turn}")).unwrap()));
        }
        // A reader sees a whole file at any moment, except for the first, empty one.
        let path = &path;
        scope.spawn(move || {
            for _ in 0..200 {
                assert!(matches!(list(path), Ok(_) | Err(KeyFileError::Missing(_))));
            }
        });
    });
    assert_eq!(list(&path).unwrap().len(), 40);
}

#[test]
fn a_key_file_open_to_others_is_refused_with_advice() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    add(&path, "first").unwrap();
    for mode in [0o640, 0o604, 0o620, 0o601, 0o666] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        for refused in [list(&path).map(drop), add(&path, "second"), read_private(&path).map(drop)] {
            let error = refused.unwrap_err().to_string();
            assert_eq!(error, format!("{0} has mode {mode:04o}, so others than its owner may use it: `chmod 600 {0}`", path.display()));
        }
    }
    for mode in [0o600, 0o400] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(names(&list(&path).unwrap()), ["first"]);
    }
}

#[test]
fn a_missing_key_file_is_reported_with_advice() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    let error = list(&path).unwrap_err().to_string();
    assert!(error.contains("does not exist") && error.contains("hostler keys create --file"), "{error}");
    let error = change(&path, false, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_linked_key_file_is_changed_behind_its_link() {
    let folder = TempDir::new().unwrap();
    let (real, link) = (folder.path().join("real.toml"), folder.path().join("keys.toml"));
    add(&real, "first").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    add(&link, "second").unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(&list(&real).unwrap()), ["first", "second"]);
}

#[test]
#[allow(clippy::disallowed_methods, reason = "a thread of its own, and no runtime")]
fn a_locked_key_file_is_waited_for_within_limits() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("keys.toml");
    add(&path, "first").unwrap();
    let other = File::open(&path).unwrap();
    other.lock().unwrap();
    let freed = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(other);
    });
    add(&path, "second").unwrap();
    freed.join().unwrap();
    assert_eq!(names(&list(&path).unwrap()), ["first", "second"]);
}

#[test]
fn an_invalid_key_file_is_refused_with_the_reason() {
    let entry = entry("x");
    let good = to_toml(vec![entry.clone()]).unwrap();
    assert_eq!(parse("").unwrap().len(), 0);
    let digest = String::from(entry.sha256);
    let cases = [
        (good.replace("role = \"use\"", "role = \"root\""), "unknown variant `root`"),
        (good.replace("role", "rule"), "unknown field `rule`"),
        (good.replace("[[key]]", "[[keys]]"), "unknown field `keys`"),
        (good.replace(&digest, "abc"), "64 hexadecimal digits"),
        (good.replace(&entry.id, "Team-A"), "its id is not one"),
        (good.replace("tenant = \"t\"", "tenant = \"\""), "the tenant not empty"),
        (good.replace("tenant = \"t\"", "tenant = \"a\\nb\""), "one line"),
        (format!("{good}expires = \"tomorrow\"\n"), "\"tomorrow\" is no time"),
        (format!("{good}models = []\n"), "leave `models` out"),
        (format!("{good}models = [\"\"]\n"), "a model's name"),
        (format!("{good}[key.limits]\nin_flight = 0\n"), "in_flight = 0"),
        (format!("{good}[key.limits]\nweight = -1.0\n"), "weight = -1"),
        (format!("{good}[key.limits]\ninput = 5\n"), "unknown field `input`"),
        (format!("{good}{}", good.strip_prefix(FILE_HEADER).unwrap()), "is there twice"),
        (good[..good.len() - 4].to_owned(), "TOML parse error"),
    ];
    for (text, expected) in cases {
        let error = parse(&text).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}\n{text}");
    }
}

#[test]
fn a_key_ends_at_its_exact_second() {
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let key = KeyEntry { expires: Some(Timestamp::of(at(200))), ..entry("x") };
    assert_eq!(key.status(at(199)), KeyStatus::Valid);
    assert_eq!(key.status(at(200)), KeyStatus::Expired);
    let key = KeyEntry { revoked: Some(Timestamp::of(at(100))), ..key };
    assert_eq!([99, 100, 300].map(|time| key.status(at(time))), [KeyStatus::Valid, KeyStatus::Revoked, KeyStatus::Revoked]);
    assert_eq!(String::from(Timestamp::after(at(0), Duration::MAX)), "9999-12-31T23:59:59Z");
}

fn moments() -> impl Strategy<Value = Timestamp> {
    (0..=LAST_SECOND).prop_map(|seconds| Timestamp::of(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)))
}

prop_compose! {
    fn limits()(
        in_flight in option::of(1_u32..),
        counts in vec(option::of(1..=u64::MAX >> 1), 5),
        weight in option::of(1e-3_f64..1e6),
    ) -> KeyLimits {
        KeyLimits {
            in_flight,
            requests_per_minute: counts[0],
            input_per_minute: counts[1],
            input_per_day: counts[2],
            output_per_minute: counts[3],
            output_per_day: counts[4],
            weight,
        }
    }
}

prop_compose! {
    fn entries()(
        name in "\\PC{0,60}",
        tenant in "\\PC{1,60}",
        is_admin: bool,
        created in moments(),
        expires in option::of(moments()),
        revoked in option::of(moments()),
        models in option::of(vec("\\PC{1,40}", 1..4)),
        limits in limits(),
    ) -> KeyEntry {
        let role = if is_admin { Role::Admin } else { Role::Use };
        KeyEntry { name, tenant, role, created, expires, revoked, models, limits, ..entry("") }
    }
}

proptest! {
    #[test]
    fn keys_are_read_as_they_were_written(entries in vec(entries(), 0..6)) {
        let written = to_toml(entries.clone()).unwrap();
        let read = parse(&written).unwrap();
        let json = |entries: &[KeyEntry]| entries.iter().map(|entry| serde_json::to_value(entry).unwrap()).collect::<Vec<_>>();
        prop_assert_eq!(json(&read), json(&entries));
        prop_assert_eq!(to_toml(read).unwrap(), written);
    }

    #[test]
    fn any_key_file_is_parsed_or_refused(text in "\\PC{0,200}", end in 0_usize..400) {
        let _ = parse(&text);
        let good = super::to_toml(vec![entry("name"), entry("other")]).unwrap();
        let _ = parse(good.get(..end).unwrap_or(&good));
    }
}
