//! Requests that are worded so that the router would read one thing and an engine another: by their form's parts, by their path, by the
//! route that carries others, by their priority. Each is refused, or read by both in one way.

use std::path::PathBuf;
use std::time::SystemTime;

use bytes::Bytes;
use hostler_router::keys::{Entry, Secret, change};
use http::Request;
use http_body_util::Full;
use tempfile::TempDir;

use crate::harness::{Answer, Fleet, MODEL, Setup};

const AUDIO: &str = "/v1/audio/transcriptions";
const FORM: &str = "multipart/form-data; boundary=b";

/// What simulated engines say to a route that they do not have: the request reached one.
const REACHED: &str = r#"{"detail":"Not Found"}"#;

/// A key file in a folder of its own.
struct Ring(TempDir);

impl Ring {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("keys.toml")
    }

    /// A key that is like this.
    fn key(&self, shape: impl FnOnce(&mut Entry)) -> String {
        let secret = Secret::random().unwrap();
        let mut entry = Entry::new(&secret, "tenant", SystemTime::now());
        shape(&mut entry);
        change(&self.file(), true, |entries| {
            entries.push(entry);
            Ok(())
        })
        .unwrap();
        secret.reveal().to_owned()
    }

    async fn fleet(&self, setup: Setup) -> Fleet {
        let file = self.file();
        Fleet::start(setup.router(|router| router.keys_file = file)).await
    }
}

/// Asks with a key, or without one.
async fn ask(fleet: &Fleet, key: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
    let request = headers.iter().fold(Request::post(path), |request, (name, value)| request.header(*name, *value));
    let request = if key.is_empty() { request } else { request.header("authorization", format!("Bearer {key}")) };
    fleet.edge().request(request.body(Full::from(body.into())).unwrap()).await
}

fn part(head: &str, value: &str) -> String {
    format!("--b\r\n{head}\r\n\r\n{value}\r\n")
}

fn field(name: &str, value: &str) -> String {
    part(&format!("Content-Disposition: form-data; name=\"{name}\""), value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_for_one_model_reaches_no_other_by_a_form_that_has_two_readings() {
    let ring = Ring::new();
    let key = ring.key(|entry| entry.models = Some(vec![MODEL.to_owned()]));
    let fleet = ring.fleet(Setup::agents(1)).await;
    let send = async |form: &str, body: String| ask(&fleet, &key, AUDIO, &[("content-type", form)], body).await;
    let (own, other) = (field("model", MODEL), field("model", "other"));
    let sound = part("Content-Disposition: form-data; name=\"file\"; filename=\"a; name.wav\"", "RIFF");
    let whole = |parts: &[&str]| parts.concat() + "--b--\r\n";
    for sound_one in [whole(&[&own, &sound]), whole(&[&sound, &own])] {
        assert_eq!(send(FORM, sound_one).await.text(), REACHED);
    }
    // To python-multipart each of these has no model, or another one.
    for (form, body) in [
        (FORM, whole(&[&field("MODEL", MODEL), &sound])),
        (FORM, whole(&[&own, &sound]).replace("name=\"model\"", "NAME=\"model\"")),
        ("multipart/form-data; boundary=b; boundary=c", whole(&[&own]) + &whole(&[&other]).replace("--b", "--c")),
        ("multipart/form-data; boundary=b; boundary*=utf-8''c", whole(&[&own])),
        ("multipart/form-data; charset=cp037; boundary=b", whole(&[&own])),
        (FORM, own.clone() + &other.replacen("--b\r\n", "--b \r\n", 1) + "--b--\r\n"),
        (FORM, format!("\n{other}") + &whole(&[&own])),
        (FORM, sound.clone() + &own),
        (
            FORM,
            whole(&[&own, &part("Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"", "other")]),
        ),
        (FORM, whole(&[&own, &part("Content-Disposition: form-data; name=\"x\"; filename=\"\\\\\"; name=\"model\"; z=\"", "other")])),
    ] {
        let answer = send(form, body.clone()).await;
        assert!(matches!(answer.status.as_u16(), 400 | 403) && answer.text() != REACHED, "{form}\n{body}\n{}", answer.text());
    }
    let twice = send(FORM, whole(&[&own, &other])).await;
    assert!(twice.status == 400 && twice.message().contains("`model` twice"), "{}", twice.text());
    fleet.until_idle().await;
}
