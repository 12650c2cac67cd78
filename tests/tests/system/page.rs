//! The page at `/` of the admin listener: access, the actions allowed to a browser, and the data it
//! gets.

use bytes::Bytes;
use hostler_proto::fleet::v1::OpenPageRequest;
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::harness::{Answer, Answering, CHAT, Endpoint, Fleet, Setup, chat_stream, hostler, until};

const EVENTS: &str = "/page/events";
const ORDERS: &str = "/page/orders";
const SESSION: &str = "/page/session";

/// Page of a fleet's router, as a browser requests it.
struct Page {
    admin: Endpoint,
    host: String,
}

impl Page {
    fn of(fleet: &Fleet) -> Self {
        let address = fleet.routers[0].admin;
        Self { admin: Endpoint::Tcp(address), host: address.to_string() }
    }

    fn request(&self, method: Method, path: &str, body: Option<&Value>, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = if headers.iter().any(|(name, _)| *name == "host") { request } else { request.header("host", &self.host) };
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(body.map_or_else(Full::default, |body| Full::from(body.to_string()))).unwrap()
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.admin.request(self.request(Method::GET, path, None, headers)).await
    }

    async fn post(&self, path: &str, body: &Value, headers: &[(&str, &str)]) -> Answer {
        self.admin.request(self.request(Method::POST, path, Some(body), headers)).await
    }

    /// Signs in as the script does.
    async fn sign_in(&self, fleet: &Fleet, watch_only: bool) -> String {
        let token = fleet.admin().open_page(OpenPageRequest { watch_only }).await.unwrap().token;
        let answer = self.post(SESSION, &json!({ "token": token }), &[]).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["may_operate"], !watch_only);
        bearer(answer.json()["session"].as_str().unwrap())
    }

    async fn watch(&self, session: &str) -> Answering {
        self.admin.send(self.request(Method::GET, EVENTS, None, &[("authorization", session)])).await
    }
}

fn bearer(session: &str) -> String {
    format!("Bearer {session}")
}

/// Events that have come so far.
fn pictures(answering: &Answering) -> Vec<Value> {
    let text = String::from_utf8_lossy(&answering.read);
    let whole = text.rsplit_once("\n\n").map_or("", |(whole, _)| whole);
    whole.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_token_is_traded_once_for_a_session() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let printed = hostler(&["page", "--no-open", "--admin", fleet.admin().socket()]).await;
    assert!(printed.success, "{}", printed.stderr);
    let (address, token) = printed.stdout.trim().split_once("/#token=").unwrap();
    assert_eq!(address, format!("http://{}", page.host));
    let begun = page.post(SESSION, &json!({ "token": token }), &[]).await;
    assert_eq!((begun.status.as_u16(), &begun.json()["may_operate"]), (200, &json!(true)));
    let session = bearer(begun.json()["session"].as_str().unwrap());
    let again = page.post(SESSION, &json!({ "token": token }), &[]).await;
    assert!(again.status == 403 && again.text().contains("hostler page"), "{}", again.text());
    let mut events = page.watch(&session).await;
    assert_eq!((events.status.as_u16(), events.headers["content-type"].to_str().unwrap()), (200, "text/event-stream"));
    events.events(2).await;
    let pictures = pictures(&events);
    assert_eq!((&pictures[0]["whole"], &pictures[1]["whole"]), (&json!(true), &json!(false)));
    assert_eq!(pictures[0]["nodes"][0]["replicas"][0]["phase"], "ready");
    assert_eq!(pictures[1]["node_names"], json!(["n0"]), "what is left is always named, so that what is gone can go");
}

#[tokio::test(start_paused = true)]
async fn the_page_shows_no_fleet_without_a_session() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let document = page.get("/", &[]).await;
    assert!(document.status == 200 && document.text().contains("hostler page") && !document.text().contains("n0"));
    for path in [EVENTS, "/page/requests/1", "/page/steps/replica/n0/0", "/page/steps/tenant/x.y", "/page/anything", "/page/logs/n0/0"] {
        for headers in [&[][..], &[("authorization", "Bearer 0")], &[("cookie", "session=0")]] {
            let refused = page.get(path, headers).await;
            assert!(refused.status == 401 && refused.text().contains("hostler page"), "{path}: {}", refused.text());
        }
    }
    let token = fleet.admin().open_page(OpenPageRequest::default()).await.unwrap().token;
    assert_eq!(page.get(EVENTS, &[("authorization", &bearer(&token))]).await.status, 401, "a token is no session");
    let ordered = page.post(ORDERS, &json!({ "order": "drain", "target": "n0" }), &[]).await;
    assert_eq!(ordered.status, 401);
    let by_key = page.post(SESSION, &json!({ "key": "hk_nonsense" }), &[]).await;
    assert!(by_key.status == 403 && by_key.text().contains("no keys"), "{}", by_key.text());
    // Over the socket a browser may come through a tunnel, with whatever pages it has open.
    let tunnel = Endpoint::Unix(fleet.admin().socket().into());
    let refused = tunnel.request(page.request(Method::POST, ORDERS, Some(&json!({ "order": "drain", "target": "n0" })), &[])).await;
    assert_eq!(refused.status, 401);
    assert!(fleet.replica("n0/0").await.is_ready(), "nothing was drained");
}

#[tokio::test(start_paused = true)]
async fn a_watching_session_orders_nothing_and_an_operating_one_may() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let page = Page::of(&fleet);
    let watching = page.sign_in(&fleet, true).await;
    let drain = json!({ "order": "drain", "target": "n0/0" });
    let refused = page.post(ORDERS, &drain, &[("authorization", &watching)]).await;
    assert!(refused.status == 403 && refused.text().contains("--watch"), "{}", refused.text());
    let log = page.get("/page/logs/n0/0", &[("authorization", &watching)]).await;
    assert!(log.status == 403 && log.text().contains("--watch"), "{}", log.text());
    let operating = page.sign_in(&fleet, false).await;
    let log = page.get("/page/logs/n0/0", &[("authorization", &operating)]).await;
    assert!(log.status == 200 && log.text().contains("of this engine begins"), "{}", log.text());
    let nobodys = page.get("/page/logs/n7/0", &[("authorization", &operating)]).await;
    assert!(nobodys.status == 404 && nobodys.text().contains("n0/0"), "{}", nobodys.text());
    let order = async |body: Value| page.post(ORDERS, &body, &[("authorization", &operating)]).await;
    let nobody = order(json!({ "order": "drain", "target": "" })).await;
    assert_eq!(nobody.status, 409, "never the whole fleet by an empty name: {}", nobody.text());
    let unknown = order(json!({ "order": "drain", "target": "n7" })).await;
    assert!(unknown.status == 404 && unknown.text().contains("n0/0"), "{}", unknown.text());
    assert!(fleet.replica("n0/0").await.is_ready() && fleet.replica("n1/0").await.is_ready(), "nothing was drained");
    let drained = order(drain).await;
    assert_eq!((drained.status.as_u16(), drained.json()), (200, json!({ "replicas": ["n0/0"] })));
    until("the replica stopped", async || {
        let seen = fleet.replica("n0/0").await;
        if seen.is_ready() { Err(format!("{seen:?}")) } else { Ok(()) }
    })
    .await;
    assert!(fleet.replica("n1/0").await.is_ready());
}

#[tokio::test(start_paused = true)]
async fn pages_of_other_origins_get_nothing_even_with_a_session() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let session = page.sign_in(&fleet, false).await;
    let shown = ("authorization", session.as_str());
    let drain = json!({ "order": "drain", "target": "n0" });
    let own = format!("http://{}", page.host);
    for (headers, words) in [
        (&[shown, ("origin", "https://evil.example")][..], "origin"),
        (&[shown, ("origin", "null")], "origin"),
        // Another port of this host may belong to another user.
        (&[shown, ("origin", "http://127.0.0.1:1")], "origin"),
        (&[shown, ("sec-fetch-site", "cross-site")], "sec-fetch-site"),
        (&[shown, ("sec-fetch-site", "same-site")], "sec-fetch-site"),
        (&[shown, ("host", "evil.example")], "localhost"),
    ] {
        for refused in [page.post(ORDERS, &drain, headers).await, page.get(EVENTS, headers).await] {
            assert!(refused.status == 403 && refused.text().contains(words), "{headers:?}: {}", refused.text());
        }
        let token = fleet.admin().open_page(OpenPageRequest::default()).await.unwrap().token;
        assert_eq!(page.post(SESSION, &json!({ "token": token }), headers).await.status, 403, "{headers:?}");
    }
    assert_eq!(page.get("/", &[("host", "evil.example")]).await.status, 403);
    let preflight_request =
        page.request(Method::OPTIONS, ORDERS, None, &[("origin", "https://evil.example"), ("access-control-request-method", "POST")]);
    let preflight = page.admin.request(preflight_request).await;
    assert!(preflight.header("access-control-allow-origin").is_none(), "{}", preflight.text());
    assert!(fleet.replica("n0/0").await.is_ready(), "nothing was drained");
    let as_its_own = [shown, ("origin", &own), ("sec-fetch-site", "same-origin")];
    let heard = page.post(ORDERS, &json!({ "order": "drain", "target": "n7" }), &as_its_own).await;
    assert_eq!(heard.status, 404, "the page's own script is heard: {}", heard.text());
}

#[tokio::test(start_paused = true)]
async fn browsers_are_told_to_run_only_the_pages_own_files() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let document = page.get("/", &[]).await;
    let text = document.text();
    let files: Vec<&str> = text.split('"').filter(|value| value.starts_with("/page/")).collect();
    assert!(files.len() >= 2 && text.matches("<script").count() == 1 && !text.contains("style="), "{text}");
    for path in [&["/"][..], &files, &["/page/nothing.js"]].concat() {
        let answer = page.get(path, &[]).await;
        let policy = answer.header("content-security-policy").unwrap();
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ] {
            assert!(policy.contains(part), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        let others =
            ["x-content-type-options", "referrer-policy", "cache-control", "x-frame-options"].map(|name| answer.header(name).unwrap());
        assert_eq!(others, ["nosniff", "no-referrer", "no-store", "DENY"], "{path}");
        assert_eq!(answer.status == 200, path != "/page/nothing.js", "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_explained_with_each_candidates_cost() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let page = Page::of(&fleet);
    let session = page.sign_in(&fleet, true).await;
    let answer = fleet.edge().post(CHAT, &chat_stream(4)).await;
    let id = answer.header("x-hostler-id").unwrap().to_owned();
    let mut events = page.watch(&session).await;
    let listed = until("the request in the list", async || {
        events.piece().await?;
        let pictures = pictures(&events);
        let mut requests = pictures.iter().flat_map(|picture| picture["requests"].as_array().unwrap());
        let found = requests.rfind(|request| request["id"] == id.as_str() && !request["first_token"].is_null());
        found.cloned().ok_or_else(|| format!("{pictures:?}"))
    })
    .await;
    assert!(listed["predicted_first_token"].as_f64().unwrap() > 0.0 && listed["replica"].as_str().unwrap().ends_with("/0"), "{listed}");
    let explained = page.get(&format!("/page/requests/{id}"), &[("authorization", &session)]).await.json();
    let candidates = explained[0]["scored"].as_array().unwrap();
    assert_eq!(candidates.len(), 2, "{explained}");
    for cost in ["queue", "prefill", "steps", "memory", "congestion", "decode"] {
        assert!(candidates.iter().all(|candidate| candidate["terms"][cost].is_number()), "{cost}: {explained}");
    }
    let chosen = explained[0]["chosen"].as_u64().unwrap();
    assert_eq!(candidates[usize::try_from(chosen).unwrap()]["replica"], listed["replica"]);
    let forgotten = page.get("/page/requests/ffffffffffffffff", &[("authorization", &session)]).await;
    assert!(forgotten.status == 404 && forgotten.text().contains("its last 10000 decisions"), "{}", forgotten.text());
}

#[tokio::test(start_paused = true)]
async fn excess_viewers_are_refused_until_one_leaves() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let session = page.sign_in(&fleet, true).await;
    let mut viewers = Vec::new();
    for _ in 0..64 {
        let mut viewer = page.watch(&session).await;
        viewer.events(1).await;
        viewers.push(viewer);
    }
    let refused = page.get(EVENTS, &[("authorization", &session)]).await;
    assert!(refused.status == 503 && refused.text().contains("close one"), "{}", refused.text());
    viewers.pop();
    until("room again", async || {
        let status = page.watch(&session).await.status;
        if status == 200 { Ok(()) } else { Err(status.to_string()) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_router_that_leaves_ends_its_viewers_at_once() {
    let fleet = Fleet::start(Setup::agents(1)).await;
    let page = Page::of(&fleet);
    let session = page.sign_in(&fleet, true).await;
    let mut viewer = page.watch(&session).await;
    viewer.events(1).await;
    fleet.routers[0].shutdown.drain();
    viewer.finish().await;
}
