//! Several routers over the same agents, several addresses of one router, and agents that break the
//! contract.

use std::time::Duration;

use hostler_proto::agent::v1::attach_request::Message;
use hostler_proto::agent::v1::attach_response::Message as ToAgent;
use hostler_proto::agent::v1::directive::Order;
use hostler_proto::agent::v1::{
    AttachRequest, AttachResponse, Directive, FrameBatch, Hello, LoadWish, Phase, ReplicaReport, ReplicaState, Report,
};
use hostler_proto::{PROTOCOL, TICKET_KEY};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Streaming};

use crate::harness::{CHAT, Fleet, Setup, attach, chat, chat_stream, link, soon, until};

#[tokio::test(start_paused = true)]
async fn two_routers_share_agents_and_see_each_others_requests() {
    let fleet = Fleet::start(Setup::two_agents().routers(2)).await;
    let mut opened = Vec::new();
    for router in [0, 0, 1, 1, 1, 1] {
        let mut stream = fleet.routers[router].edge().open(CHAT, &chat_stream(10_000)).await;
        stream.events(2).await;
        opened.push(stream);
        // The next choice knows of this one.
        let open = opened.len();
        for router in &fleet.routers {
            until("the request seen", async || {
                let replicas = router.admin().replicas().await.unwrap();
                let seen: u32 = replicas.iter().map(|replica| replica.in_flight).sum();
                if seen as usize == open { Ok(()) } else { Err(format!("{replicas:#?}")) }
            })
            .await;
        }
    }
    for (router, local) in fleet.routers.iter().zip([1, 2]) {
        for replica in router.admin().replicas().await.unwrap() {
            assert_eq!((replica.local_in_flight, replica.in_flight), (local, 3), "the six are spread evenly over both: {replica:?}");
        }
    }
    drop(opened);
    fleet.until_idle().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_another_router_has_just_filled_refuses_nothing() {
    let fleet = Fleet::start(Setup::agents(1).engine("--max-num-seqs 1 --max-num-queued-reqs 1").routers(2)).await;
    for _ in 0..20 {
        // The first two fill the engine, and no report has said so yet.
        let requests = [0, 0, 1, 1].map(|router| {
            let edge = fleet.routers[router].edge();
            async move { edge.post(CHAT, &chat(4)).await }
        });
        for answer in soon("all answers", futures_util::future::join_all(requests)).await {
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        fleet.until_idle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_attaches_once_to_a_router_of_two_addresses() {
    let mut fleet = Fleet::launch(Setup::agents(0).router(|router| {
        (router.agents_listen, router.allow_plain_text) = ("0.0.0.0:0".into(), true);
    }))
    .await;
    let port = fleet.routers[0].agents.port();
    fleet.add_agent(vec![format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}")]).await;
    until("a ready replica", async || {
        let replicas = fleet.admin().replicas().await.unwrap();
        if replicas.iter().any(crate::harness::Seen::is_ready) { Ok(()) } else { Err(format!("{replicas:?}")) }
    })
    .await;
    // The second address is tried repeatedly meanwhile. If it attached, it would take the lanes of
    // the first.
    let stream = fleet.edge().open(CHAT, &chat_stream(300)).await;
    stream.finish().await.assert_whole_stream();
    assert_eq!(fleet.admin().nodes().await.unwrap().len(), 1);
}

fn hello(protocol: u32) -> Message {
    Message::Hello(Hello { protocol, agent_version: "9.8.7".into(), node: "other-version".into(), life: 7, job: None })
}

fn report(sequence: u64, snapshot: bool) -> Message {
    let state = ReplicaState { phase: Phase::Ready.into(), reason: "the engine serves".into(), ..ReplicaState::default() };
    let replica = ReplicaReport { index: 0, epoch: 1, state: Some(state), ..ReplicaReport::default() };
    Message::Report(Report { sequence, snapshot, replicas: if snapshot { vec![replica] } else { Vec::new() }, job: None })
}

async fn next(answers: &mut Streaming<AttachResponse>) -> ToAgent {
    soon("a message of the router", answers.message()).await.unwrap().expect("the stream goes on").message.unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_agent_of_another_protocol_is_refused_naming_both_versions() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    let refused = attach(fleet.routers[0].agents, [hello(PROTOCOL + 1)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    for part in ["agent 9.8.7 speaks protocol 2", "router 0.2.0 speaks protocol 1", "the same version"] {
        assert!(refused.message().contains(part), "{}", refused.message());
    }
    let refused = attach(fleet.routers[0].agents, [report(0, true)]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert_eq!(fleet.admin().nodes().await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn a_lane_without_a_valid_ticket_is_refused() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    let address = fleet.routers[0].agents;
    let (sender, mut answers) = attach(address, [hello(PROTOCOL)]).await.unwrap();
    let ToAgent::Welcome(welcome) = next(&mut answers).await else { panic!("no welcome") };
    let carry = async |ticket: &[u8]| {
        let mut client = link(address).await;
        let mut request = Request::new(tokio_stream::pending::<FrameBatch>());
        request.metadata_mut().insert_bin(TICKET_KEY, MetadataValue::from_bytes(ticket));
        soon("an answer to Carry", client.carry(request)).await.map(drop)
    };
    let mut wrong = welcome.ticket.to_vec();
    wrong[0] ^= 1;
    for ticket in [&wrong[..], b""] {
        assert_eq!(carry(ticket).await.unwrap_err().code(), Code::Unauthenticated);
    }
    carry(&welcome.ticket).await.unwrap();
    // The ticket ends with its attachment.
    drop((sender, answers));
    until("the ticket to end", async || match carry(&welcome.ticket).await {
        Err(status) if status.code() == Code::Unauthenticated => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_agents_replicas_become_suspect_until_it_reports_again() {
    let fleet = Fleet::launch(Setup::agents(0).router(|router| router.lease = Duration::from_millis(500))).await;
    let (sender, mut answers) = attach(fleet.routers[0].agents, [hello(PROTOCOL), report(0, true)]).await.unwrap();
    let ToAgent::Welcome(welcome) = next(&mut answers).await else { panic!("no welcome") };
    assert_eq!(welcome.lease_ms, 500);
    let suspect = async |expected: bool| {
        until(&format!("suspect: {expected}"), async || {
            let replicas = fleet.admin().replicas().await.unwrap();
            if replicas.iter().any(|replica| replica.suspect == expected) { Ok(()) } else { Err(format!("{replicas:?}")) }
        })
        .await;
    };
    suspect(true).await;
    sender.send(AttachRequest { message: Some(report(1, false)) }).await.unwrap();
    suspect(false).await;
    suspect(true).await;
    drop((sender, answers));
    until("the node to be shown as lost", async || {
        let nodes = fleet.admin().nodes().await.unwrap();
        if nodes.iter().any(|node| !node.attached) { Ok(()) } else { Err(format!("{nodes:?}")) }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_report_makes_the_router_ask_for_a_snapshot() {
    let fleet = Fleet::launch(Setup::agents(0)).await;
    let (sender, mut answers) = attach(fleet.routers[0].agents, [hello(PROTOCOL), report(0, true), report(2, false)]).await.unwrap();
    assert!(matches!(next(&mut answers).await, ToAgent::Welcome(_)));
    let asks = |message: ToAgent| matches!(message, ToAgent::Directive(directive) if matches!(directive.order, Some(Order::Resync(_))));
    assert!(asks(next(&mut answers).await));
    for message in [report(0, true), report(1, false), report(3, false)] {
        sender.send(AttachRequest { message: Some(message) }).await.unwrap();
    }
    assert!(asks(next(&mut answers).await), "after the snapshot only the next gap asks again");
}

#[tokio::test(start_paused = true)]
async fn nodes_take_turns_in_reading_from_a_file_system() {
    let fleet = Fleet::launch(Setup::agents(0).router(|router| router.max_loads = 1)).await;
    let wish = |file_system: &str| Message::LoadWish(LoadWish { file_system: file_system.into(), holds: false });
    let begin = async |node: &str| {
        let Message::Hello(hello) = hello(PROTOCOL) else { panic!("no hello") };
        let hello = Message::Hello(Hello { node: node.into(), ..hello });
        let (sender, mut answers) = attach(fleet.routers[0].agents, [hello, report(0, true), wish("files:/m")]).await.unwrap();
        let ToAgent::Welcome(welcome) = next(&mut answers).await else { panic!("no welcome") };
        assert_eq!(welcome.max_loads, 1);
        (sender, answers)
    };
    let turn = |message: ToAgent| match message {
        ToAgent::Directive(Directive { order: Some(Order::LoadTurn(turn)), .. }) => (turn.granted, turn.ahead),
        other => panic!("{other:?}"),
    };
    let (first, mut first_answers) = begin("a").await;
    assert_eq!(turn(next(&mut first_answers).await), (true, 0));
    let (second, mut second_answers) = begin("b").await;
    assert_eq!(turn(next(&mut second_answers).await), (false, 0));
    let (_third, mut third_answers) = begin("c").await;
    assert_eq!(turn(next(&mut third_answers).await), (false, 1));
    // The first has read; the second leaves in the middle of it.
    first.send(AttachRequest { message: Some(wish("")) }).await.unwrap();
    assert_eq!(turn(next(&mut second_answers).await), (true, 0));
    assert_eq!(turn(next(&mut third_answers).await), (false, 0));
    drop((second, second_answers));
    assert_eq!(turn(next(&mut third_answers).await), (true, 0));
}
