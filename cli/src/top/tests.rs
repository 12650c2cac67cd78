//! Behaviour of the model, and its screens.

mod fixture;
mod screens;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use self::fixture::{at, fleet, model, past, press, seen, type_keys};
use super::keys::KeyIntent;
use super::model::{KeyMode, Panel, ReplicaDetail};
use super::order::{FleetOrder, OrderKind};

fn shown(model: &super::model::TopModel) -> Vec<String> {
    model.shown_replicas().iter().map(|of| of.replica.id.clone()).collect()
}

fn words(model: &super::model::TopModel) -> Vec<String> {
    model.events.latest(100).map(|event| event.words.clone()).collect()
}

#[test]
fn the_routers_events_stand_in_the_order_in_which_they_happened() {
    let mut model = seen(fleet(), 0);
    assert!(words(&model).is_empty());
    model.events.extend(past(&[(1, 3, "node gpu-1 has come"), (2, 9, "gpu-1/0 ready → failed: CUDA out of memory")]));
    model.events.push(at(5).wall, "the router answers again, after 3 s".into());
    let told = ["node gpu-1 has come", "the router answers again, after 3 s", "gpu-1/0 ready → failed: CUDA out of memory"];
    assert_eq!((words(&model), model.events.last_number()), (told.map(str::to_owned).to_vec(), 2));
    model.events.extend(past(&[]));
    assert_eq!(model.events.last_number(), 0, "a router that has begun anew is asked for everything");
    model.events.extend(past(&[(1, 12, "router 0.3.0 has begun")]));
    assert_eq!((words(&model).len(), model.events.last_number()), (4, 1));
}

#[test]
fn a_silent_router_leaves_its_last_figures_marked_old() {
    let mut model = seen(fleet(), 0);
    assert_eq!(model.age(), None);
    model.note_silence("no answer within 5 s".into(), at(6));
    model.note_silence("nobody answers".into(), at(8));
    assert_eq!((model.age().unwrap().as_secs(), model.silence.as_ref().unwrap().since.at), (8, at(6).at));
    assert_eq!(shown(&model).len(), 4);
    assert_eq!(press(&mut model, KeyCode::Char('d')), None);
    assert!(model.mode == KeyMode::Browse && model.notice.contains("the router does not answer"), "{}", model.notice);
    model.apply(fleet(), at(9));
    assert_eq!(model.age(), None);
    assert_eq!(words(&model), ["the router does not answer: no answer within 5 s", "the router answers again, after 3 s"]);
}

#[test]
fn replicas_sort_by_urgency_and_the_selection_follows_its_replica() {
    let mut model = seen(fleet(), 0);
    let mut later = fleet();
    later.nodes[1].replicas[0].load.as_mut().unwrap().engine.as_mut().unwrap().generation_tokens += 500;
    model.apply(later, at(1));
    assert_eq!(shown(&model), ["gpu-1/0", "gpu-2/0", "gpu-2/1", "x3.12/0"]);
    press(&mut model, KeyCode::Down);
    assert_eq!(model.selected_replica.as_deref(), Some("gpu-2/0"));
    type_keys(&mut model, "s");
    assert_eq!((model.sort.as_str(), shown(&model)[0].as_str()), ("phase", "gpu-2/1"), "which has failed");
    type_keys(&mut model, "ssss");
    assert_eq!((model.sort.as_str(), shown(&model)[0].as_str()), ("tokens/s", "gpu-2/0"));
    type_keys(&mut model, "S");
    assert_eq!(shown(&model)[3], "gpu-2/0");
    assert_eq!((model.selected_replica.as_deref(), model.selected_row(Panel::Replicas)), (Some("gpu-2/0"), Some(3)));
    type_keys(&mut model, "jjj");
    assert_eq!(model.selected_row(Panel::Replicas), Some(3), "there is nothing below the last");
    type_keys(&mut model, "gk");
    assert_eq!(model.selected_row(Panel::Replicas), Some(0));
}

#[test]
fn a_typed_filter_hides_what_does_not_match() {
    let mut model = seen(fleet(), 0);
    type_keys(&mut model, "/FAILq");
    press(&mut model, KeyCode::Backspace);
    assert_eq!((shown(&model), model.selected_replica.as_deref()), (vec!["gpu-2/1".to_owned()], Some("gpu-2/1")));
    press(&mut model, KeyCode::Enter);
    assert_eq!((model.mode.clone(), press(&mut model, KeyCode::Esc)), (KeyMode::Browse, None), "the first Esc shows all again");
    assert_eq!((shown(&model).len(), press(&mut model, KeyCode::Esc)), (4, Some(KeyIntent::Quit)));
    type_keys(&mut model, "/12.head");
    assert_eq!(shown(&model), ["x3.12/0"], "a job");
    press(&mut model, KeyCode::Esc);
    assert_eq!((shown(&model).len(), model.mode.clone()), (4, KeyMode::Browse));
}

#[test]
fn an_order_is_sent_only_after_a_yes() {
    let mut model = seen(fleet(), 0);
    let order = FleetOrder { kind: OrderKind::Drain, target: "gpu-1/0".into() };
    for no in [KeyCode::Char('n'), KeyCode::Enter, KeyCode::Esc, KeyCode::Char('d')] {
        assert_eq!(press(&mut model, KeyCode::Char('d')), None);
        assert!(matches!(&model.mode, KeyMode::Ask(question) if question.order == order));
        assert_eq!((press(&mut model, no), model.mode.clone(), model.notice.as_str()), (None, KeyMode::Browse, "nothing was ordered"));
    }
    press(&mut model, KeyCode::Char('d'));
    assert_eq!(press(&mut model, KeyCode::Char('y')), Some(KeyIntent::Order(order.clone())));
    model.apply_order(&order, Ok(vec!["gpu-1/0".into()]), at(1));
    assert_eq!(model.notice, "ordered: drain gpu-1/0");
    model.apply_order(&order, Err("the agent is gone".into()), at(2));
    assert_eq!(model.notice, "could not drain gpu-1/0: the agent is gone");
}

#[test]
fn the_confirmation_names_affected_replicas_and_unserved_models() {
    let mut model = seen(fleet(), 0);
    press(&mut model, KeyCode::Tab);
    press(&mut model, KeyCode::Down);
    type_keys(&mut model, "r");
    let KeyMode::Ask(question) = &model.mode else { panic!("{:?}", model.mode) };
    assert_eq!(
        question.sentences(),
        [
            "restart 2 replicas of node gpu-2: gpu-2/0, gpu-2/1?",
            "7 requests run there: they move, or may finish. Then the engine starts again.",
        ]
    );
    type_keys(&mut model, "n");
    let mut alone = fleet();
    alone.nodes.truncate(1);
    model.apply(alone, at(1));
    assert_eq!(model.selected_node.as_deref(), Some("gpu-1"), "the selected one is gone");
    type_keys(&mut model, "d");
    let KeyMode::Ask(question) = &model.mode else { panic!("{:?}", model.mode) };
    assert_eq!(question.sentences()[0], "drain gpu-1/0 of node gpu-1?");
    assert_eq!(question.sentences()[2], "NOBODY WOULD SERVE Qwen/Qwen3-8B.");
}

#[test]
fn late_details_of_another_replica_are_dropped() {
    let mut model = seen(fleet(), 0);
    assert_eq!(press(&mut model, KeyCode::Enter), Some(KeyIntent::Look));
    let of = |replica: &str| ReplicaDetail { replica: replica.into(), log: Ok(vec!["line".into()]), decisions: Ok(Vec::new()) };
    model.apply_detail(of("gpu-2/0"));
    assert_eq!(model.detail.as_ref().unwrap().log, Ok(Vec::new()));
    model.apply_detail(of("gpu-1/0"));
    assert_eq!(model.detail.as_ref().unwrap().log, Ok(vec!["line".to_owned()]));
    type_keys(&mut model, "jjl");
    assert!(matches!(&model.mode, KeyMode::Ask(question) if question.order.target == "gpu-1/0"), "orders mean the replica that is open");
    type_keys(&mut model, "n");
    assert_eq!(press(&mut model, KeyCode::Esc), None);
    assert!(model.detail.is_none());
    model.apply_detail(of("gpu-1/0"));
    assert!(model.detail.is_none(), "it was left meanwhile");
}

#[test]
fn enter_on_a_node_shows_its_replicas() {
    let mut model = seen(fleet(), 0);
    press(&mut model, KeyCode::Tab);
    press(&mut model, KeyCode::Down);
    assert_eq!(press(&mut model, KeyCode::Enter), None);
    assert_eq!((model.panel, shown(&model)), (Panel::Replicas, vec!["gpu-2/0".to_owned(), "gpu-2/1".into()]));
}

#[test]
fn every_screen_can_be_left() {
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    for keys in ["", "/", "d", "?"] {
        let mut model = seen(fleet(), 0);
        type_keys(&mut model, keys);
        assert_eq!(model.press(control_c), Some(KeyIntent::Quit), "after {keys:?}");
    }
    assert_eq!(press(&mut model(), KeyCode::Char('q')), Some(KeyIntent::Quit), "before the router has answered");
}
