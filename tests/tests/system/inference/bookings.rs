//! Keys, and requests that their callers send themselves.

use hostler_proto::inference::v1::{ListModelsRequest, PlaceRequest, PlaceResponse, ReleaseRequest};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request};

use super::{chat, client, generate_streamed, text};
use crate::harness::{Fleet, Setup, hostler};

#[tokio::test(start_paused = true)]
async fn a_booking_counts_until_it_is_released_or_expires() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let mut client = client(&fleet).await;
    let place = |milliseconds: Option<i32>| PlaceRequest {
        request: Some(chat(64)),
        hold: milliseconds.map(|milliseconds| prost_types::Duration { seconds: 0, nanos: milliseconds * 1_000_000 }),
        candidates: true,
    };
    let id = |placed: &PlaceResponse| placed.booking.as_ref().unwrap().id.clone();
    let first = client.place(place(None)).await.unwrap().into_inner();
    let replica = first.placement.as_ref().unwrap().replica.clone();
    let seen = fleet.replica(&replica).await;
    assert_eq!((first.node.as_str(), first.epoch, &first.address), (&replica[..2], seen.epoch, &seen.socket));
    assert_eq!((first.has_room, seen.local_in_flight, first.booking.as_ref().unwrap().expires_in.unwrap().seconds), (true, 1, 30));
    assert!(first.placement.as_ref().unwrap().predicted_first_token_seconds > 0.0);
    assert_eq!(first.candidates.len(), 2);
    let chosen: Vec<_> = first.candidates.iter().filter(|candidate| candidate.chosen).collect();
    assert_eq!((chosen.len(), &chosen[0].replica), (1, &replica));

    // The next request sees this one counted.
    let mut load = [0; 2];
    let mut bookings = vec![id(&first)];
    for _ in 0..5 {
        bookings.push(id(&client.place(place(None)).await.unwrap().into_inner()));
    }
    for (count, replica) in load.iter_mut().zip(["n0/0", "n1/0"]) {
        *count = fleet.replica(replica).await.local_in_flight;
    }
    assert_eq!((load[0] + load[1], load.contains(&0)), (6, false), "{load:?}");
    assert_eq!(fleet.routers[0].metric("hostler_in_flight").await, 6.0);
    for booking in bookings {
        client.release(ReleaseRequest { booking: booking.clone() }).await.unwrap();
        let again = client.release(ReleaseRequest { booking }).await.unwrap_err();
        assert_eq!(again.code(), Code::NotFound);
    }
    fleet.until_idle().await;

    let short = client.place(place(Some(100))).await.unwrap().into_inner();
    fleet.until_idle().await;
    assert_eq!(client.release(ReleaseRequest { booking: id(&short) }).await.unwrap_err().code(), Code::NotFound);
    let nonsense = client.release(ReleaseRequest { booking: "nonsense".into() }).await.unwrap_err();
    assert_eq!(nonsense.code(), Code::InvalidArgument);
    assert_eq!(client.place(PlaceRequest::default()).await.unwrap_err().code(), Code::InvalidArgument);
}

/// Makes a key and returns its text.
async fn key(file: &str, more: &[&str]) -> String {
    let made = hostler(&[&["keys", "create", "--file", file], more].concat()).await;
    assert!(made.success, "{}", made.stderr);
    made.stdout.split_whitespace().find(|word| word.starts_with("hk_")).unwrap().to_owned()
}

fn with<T>(key: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", MetadataValue::try_from(format!("Bearer {key}")).unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_admins_learn_what_a_prompt_has_cached() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let path = file.to_str().unwrap();
    let user = key(path, &["--tenant", "user"]).await;
    let admin = key(path, &["--tenant", "ops", "--role", "admin"]).await;
    let fleet = Fleet::start(Setup::two_agents().router(|router| router.keys_file = file.clone())).await;
    let mut client = client(&fleet).await;
    let prompt = || text(&"as secret as it is long ".repeat(200), 2);
    let place = || PlaceRequest { request: Some(prompt()), candidates: true, ..PlaceRequest::default() };
    fleet.until_exact().await;
    let first = client.generate(with(&admin, prompt())).await.unwrap().into_inner().placement.unwrap();
    fleet.until_cached(&first.replica, "the prompt", |blocks| blocks > 50).await;
    for (key, sees) in [(&user, false), (&admin, true)] {
        let placed = client.place(with(key, place())).await.unwrap().into_inner();
        assert_eq!(placed.candidates.len(), if sees { 2 } else { 0 });
        let generated = client.generate(with(key, prompt())).await.unwrap().into_inner();
        let answer = generate_streamed(&mut client, with(key, prompt())).await.unwrap();
        for placement in [placed.placement, generated.placement, answer.started.unwrap().placement] {
            let placement = placement.unwrap();
            assert!(!placement.replica.is_empty() && placement.prompt_tokens > 0);
            let shown = (placement.matched_tokens > 0, !placement.why.is_empty(), placement.predicted_first_token_seconds > 0.0);
            assert_eq!(shown, (sees, sees, sees), "{placement:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_hold_for_grpc_and_bookings_belong_to_callers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let path = file.to_str().unwrap();
    let (one, other) = (key(path, &["--tenant", "one"]).await, key(path, &["--tenant", "other", "--model", "elsewhere"]).await);
    let fleet = Fleet::start(Setup::agents(1).router(|router| router.keys_file = file.clone())).await;
    let mut client = client(&fleet).await;
    for refused in [
        client.generate(text("x", 1)).await.unwrap_err(),
        client.generate(with("hk_nobodys", text("x", 1))).await.unwrap_err(),
        client.list_models(ListModelsRequest {}).await.unwrap_err(),
    ] {
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused:?}");
    }
    assert_eq!(client.generate(with(&one, text("x", 3))).await.unwrap().into_inner().usage.unwrap().completion_tokens, 3);
    assert_eq!(client.generate(with(&other, text("x", 1))).await.unwrap_err().code(), Code::PermissionDenied);
    assert_eq!(client.list_models(with(&other, ListModelsRequest {})).await.unwrap().into_inner().models, []);

    let place = || PlaceRequest { request: Some(chat(4)), ..PlaceRequest::default() };
    assert_eq!(client.place(with(&other, place())).await.unwrap_err().code(), Code::PermissionDenied);
    let booking = client.place(with(&one, place())).await.unwrap().into_inner().booking.unwrap().id;
    let release = || ReleaseRequest { booking: booking.clone() };
    assert_eq!(client.release(with(&other, release())).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(fleet.replica("n0/0").await.local_in_flight, 1);
    client.release(with(&one, release())).await.unwrap();
    assert_eq!(fleet.replica("n0/0").await.local_in_flight, 0);
}
