//! Screens of an operator, as text.

use crossterm::event::KeyCode;
use hostler_proto::agent::v1 as agent;
use hostler_proto::fleet::v1 as wire;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};

use super::fixture::{at, fleet, model, past, press, replica, seen, type_keys};
use crate::top::draw::draw;
use crate::top::model::{ReplicaDetail, TopModel};
use crate::top::text::is_printable;

fn screen(model: &TopModel, (width, height): (u16, u16)) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    terminal
}

fn text(model: &TopModel, size: (u16, u16)) -> String {
    let terminal = screen(model, size);
    let buffer = terminal.backend().buffer();
    let lines = (0..size.1).map(|y| (0..size.0).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned());
    lines.collect::<Vec<_>>().join("\n")
}

/// A model after a second in which one engine gave 500 tokens.
fn working() -> TopModel {
    let mut model = seen(fleet(), 0);
    let mut next = fleet();
    next.nodes[0].replicas[0].load.as_mut().unwrap().engine.as_mut().unwrap().generation_tokens += 500;
    next.nodes[1].replicas[0].state.as_mut().unwrap().phase = agent::Phase::Draining.into();
    next.nodes[1].replicas[0].state.as_mut().unwrap().reason = "an operator ordered it".into();
    next.requests = Some(wire::RequestCounts { answered: 1012, full: 900, error: 40, ..wire::RequestCounts::default() });
    model.apply(next, at(1));
    model.events.extend(past(&[(7, 1, "gpu-2/0 ready → draining: an operator ordered it")]));
    model
}

const SMALL: (u16, u16) = (80, 24);

#[test]
fn a_small_screen_shows_the_fleet() {
    insta::assert_snapshot!(text(&working(), SMALL));
}

#[test]
fn a_large_screen_shows_the_fleet() {
    insta::assert_snapshot!(text(&working(), (120, 40)));
}

#[test]
fn a_silent_routers_screen_shows_old_figures() {
    let mut model = working();
    model.note_silence("connection refused (os error 111)".into(), at(6));
    model.now = at(18);
    insta::assert_snapshot!(text(&model, SMALL));
}

#[test]
fn an_order_is_preceded_by_a_question() {
    let mut model = working();
    type_keys(&mut model, "d");
    insta::assert_snapshot!(text(&model, SMALL));
}

#[test]
fn the_help_screen_lists_the_keys() {
    let mut model = working();
    type_keys(&mut model, "?");
    insta::assert_snapshot!(text(&model, SMALL));
}

#[test]
fn an_empty_screen_says_what_it_waits_for() {
    let nobody = text(&seen(wire::ListResponse { router_version: "0.1.0".into(), ..wire::ListResponse::default() }, 0), SMALL);
    assert!(nobody.contains("no agent has attached yet: start `hostler agent"), "{nobody}");
    insta::assert_snapshot!(nobody);
    assert!(text(&model(), SMALL).contains("waiting for the router's first answer"));
}

fn opened() -> TopModel {
    let mut model = working();
    press(&mut model, KeyCode::Enter);
    let decision = |number: u64, why: &str| wire::Decision {
        id: format!("{number:016x}"),
        path: "/v1/chat/completions".into(),
        at_ms: 48_200_000 + number * 1000,
        tokens: 1200,
        why: why.into(),
        tied: 2,
        candidates: 3,
        scored: vec![wire::Scored { replica: "gpu-1/0".into(), matched: 1024, ..wire::Scored::default() }],
        first_token: Some(0.0854),
        ..wire::Decision::default()
    };
    let mut elsewhere = decision(3, "cheapest");
    elsewhere.scored[0].replica = "gpu-2/0".into();
    let log = (0..40).map(|line| format!("INFO 13:23:{line:02} engine.py:{line}: \u{1b}[32mstep\u{1b}[0m")).collect();
    let decisions = Ok(vec![decision(9, "cheapest"), elsewhere, decision(2, "near_tie"), decision(1, "only")]);
    model.apply_detail(ReplicaDetail { replica: "gpu-1/0".into(), log: Ok(log), decisions });
    model
}

#[test]
fn a_replicas_screen_shows_its_details() {
    insta::assert_snapshot!(text(&opened(), SMALL));
    let mut lost = opened();
    lost.detail.as_mut().unwrap().log = Err("no answer within 2 s".into());
    assert!(text(&lost, SMALL).contains("no answer within 2 s"));
}

/// A model with names, reasons and log lines that would set a terminal's title, clear it, turn text
/// around or break lines.
fn hostile() -> TopModel {
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2Jx\r\n\u{202e}\u{9b}31m\u{0}";
    let mut model = seen(wire::ListResponse::default(), 0);
    let model_entry = agent::Model { id: format!("m{evil}"), ..agent::Model::default() };
    let state = agent::ReplicaState {
        phase: agent::Phase::Ready.into(),
        models: vec![model_entry],
        engine_version: evil.into(),
        gpus: vec![agent::Gpu { index: 0, uuid: evil.into(), name: evil.into(), memory_bytes: 1 << 30, reading: None }],
        ..agent::ReplicaState::default()
    };
    let failed = agent::ReplicaState { phase: agent::Phase::Failed.into(), reason: format!("r{evil}"), ..agent::ReplicaState::default() };
    let job = agent::Job { scheduler: "pbs".into(), id: evil.into(), run: 1, ..agent::Job::default() };
    let node = wire::Node {
        name: format!("n{evil}"),
        agent_version: evil.into(),
        attached: true,
        replicas: vec![replica(&format!("n{evil}/0"), state), replica("n/1", failed)],
        job: Some(job.clone()),
    };
    let fleet = wire::ListResponse {
        router_version: evil.into(),
        nodes: vec![node],
        gone_jobs: vec![wire::GoneJob {
            node: evil.into(),
            job: Some(job),
            gone_ms_ago: 1,
            reason: evil.into(),
            ..wire::GoneJob::default()
        }],
        demand: vec![wire::ModelDemand { model: evil.into(), ..wire::ModelDemand::default() }],
        tenants: vec![wire::TenantUse { name: evil.into(), in_flight: 1, left: 0.5 }],
        ..wire::ListResponse::default()
    };
    model.apply(fleet, at(1));
    let told = [format!("node n{evil} has come"), format!("node {evil}: job {evil} is gone")];
    model.events.extend(past(&[(1, 1, &told[0]), (2, 1, &told[1])]));
    model
}

#[test]
fn hostile_names_send_no_control_sequences_to_the_terminal() {
    let mut screens = vec![hostile()];
    let mut asked = hostile();
    type_keys(&mut asked, "d");
    let mut opened = hostile();
    press(&mut opened, KeyCode::Enter);
    let evil = "\u{1b}[2J\u{1b}]52;c;aGk=\u{7}\u{202e}".to_owned();
    let decision = wire::Decision {
        path: evil.clone(),
        id: evil.clone(),
        scored: vec![wire::Scored { replica: opened.detail.as_ref().unwrap().replica.clone(), ..wire::Scored::default() }],
        ..wire::Decision::default()
    };
    let replica = opened.detail.as_ref().unwrap().replica.clone();
    opened.apply_detail(ReplicaDetail { replica, log: Ok(vec![evil.clone()]), decisions: Ok(vec![decision]) });
    let mut silent = hostile();
    silent.note_silence(evil, at(2));
    screens.extend([asked, opened, silent]);
    for model in &screens {
        for size in [SMALL, (200, 50)] {
            let terminal = screen(model, size);
            for cell in terminal.backend().buffer().content() {
                assert!(cell.symbol().chars().all(is_printable), "{:?}", cell.symbol());
            }
        }
    }
    insta::assert_snapshot!(text(&screens[0], SMALL));
}

#[test]
fn colours_appear_only_where_allowed() {
    let mut model = working();
    let colors = |model: &TopModel| {
        let terminal = screen(model, SMALL);
        let cells = terminal.backend().buffer().content();
        let reversed = cells.iter().filter(|cell| cell.modifier.contains(Modifier::REVERSED)).count();
        (cells.iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count(), reversed)
    };
    assert_eq!(colors(&model), (0, 80), "the selected row stands out without them");
    model.has_color = true;
    assert!(colors(&model).0 > 0);
}

#[test]
fn narrow_screens_drop_columns_and_tiny_ones_say_so() {
    let heading = |width| text(&working(), (width, 24)).lines().find(|line| line.contains("REPLICA ")).unwrap().to_owned();
    for (width, there, gone) in
        [(160, "POWER", "nothing"), (110, "CACHED", "POWER"), (80, "P99", "POWER"), (60, "TOK/S", "P99"), (50, "KV", "FIRST")]
    {
        let heading = heading(width);
        assert!(heading.contains(there) && !heading.contains(gone), "{width}: {heading}");
    }
    assert!(text(&working(), (30, 10)).contains("30×10 is too small"));
}

#[test]
fn a_long_list_scrolls_to_the_selected_row() {
    let mut long = fleet();
    let one = long.nodes[0].replicas[0].clone();
    long.nodes[0].replicas = (0..40).map(|index| wire::Replica { id: format!("gpu-1/{index}"), ..one.clone() }).collect();
    let mut model = seen(long, 0);
    press(&mut model, KeyCode::End);
    press(&mut model, KeyCode::Up);
    let shown = text(&model, SMALL);
    assert!(shown.contains("of 43") && shown.lines().any(|line| line.starts_with(">gpu-2/1")), "{shown}");
}
