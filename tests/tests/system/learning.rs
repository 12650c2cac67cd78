//! Effect of replicas' answers on the speeds that a router learns, including those that must have
//! none.

use hostler_proto::fleet::v1::Rates;
use http::StatusCode;
use serde_json::json;

use crate::harness::{CHAT, Fleet, Setup, chat_stream};

async fn rates(fleet: &Fleet) -> Vec<Rates> {
    let nodes = fleet.admin().nodes().await.unwrap();
    nodes.into_iter().flat_map(|node| node.replicas).map(|replica| replica.rates.unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn fast_refusals_do_not_make_an_engine_look_fast() {
    let fleet = Fleet::start(Setup::two_agents()).await;
    let before = rates(&fleet).await;
    for number in 0..20 {
        let mut body = chat_stream(5);
        body["messages"][0]["content"] = format!("{number} ").repeat(400).into();
        body["temperature"] = json!(-1);
        let answer = fleet.edge().post(CHAT, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text());
    }
    assert_eq!(rates(&fleet).await, before);
}

#[tokio::test(start_paused = true)]
async fn streams_teach_the_speed_of_their_engine() {
    let fleet = Fleet::start(Setup::two_agents().engine("--sim-step-ms 3 --sim-prefill-us 100")).await;
    let before = rates(&fleet).await;
    for number in 0..6 {
        let mut body = chat_stream(10);
        body["messages"][0]["content"] = format!("{number} ").repeat(600).into();
        fleet.edge().post(CHAT, &body).await.assert_whole_stream();
    }
    let after = rates(&fleet).await;
    assert!(after.iter().zip(&before).any(|(after, before)| after.prefill > 1.1 * before.prefill), "{after:?}");
}
