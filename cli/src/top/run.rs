//! The loop around the model: keys, answers of the router, ticks and signals come in one after the
//! other, and the screen follows. Only one call is under way at a time.

use std::time::{Duration, Instant, SystemTime};

use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_util::StreamExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use super::calls::{RouterAnswer, RouterCall, carry_out};
use super::draw::draw;
use super::keys::KeyIntent;
use super::model::{Moment, TopModel};
use super::terminal::TakenTerminal;
use crate::admin::{AdminClient, RouterAddress};

fn now() -> Moment {
    Moment { at: Instant::now(), wall: SystemTime::now() }
}

/// Shows the fleet until the operator leaves, a signal comes or the terminal is gone.
///
/// # Errors
/// When the terminal cannot be drawn on.
pub(super) async fn run(router: &RouterAddress, first: AdminClient, pause: Duration, has_color: bool) -> anyhow::Result<()> {
    let mut ends = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?];
    let mut screen = TakenTerminal::take()?;
    let mut model = TopModel::new(router.to_string(), has_color, now());
    let mut events = EventStream::new();
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut client = Some(first);
    let mut call = None;
    let mut is_order = false;
    // Asked again as soon as the call under way has ended.
    let mut is_due = false;
    let [terminate, interrupt, hangup] = &mut ends;
    loop {
        model.now = now();
        screen.terminal.draw(|frame| draw(frame, &model))?;
        let mut wanted = None;
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => match model.press(key) {
                    Some(KeyIntent::Quit) => return Ok(()),
                    Some(KeyIntent::Suspend) => screen.suspend()?,
                    Some(KeyIntent::Redraw) => screen.terminal.clear()?,
                    Some(KeyIntent::Look) => is_due = true,
                    // An order replaces a look, but nothing replaces an order.
                    Some(KeyIntent::Order(_)) if is_order => model.notice = "wait until the last order has been answered".to_owned(),
                    Some(KeyIntent::Order(order)) => wanted = Some(RouterCall::Order(order)),
                    None => {}
                },
                Some(Ok(_)) => {}
                // The terminal is gone.
                Some(Err(_)) | None => return Ok(()),
            },
            (answered, answer) = async { call.as_mut().expect("it is polled only while there is one").await }, if call.is_some() => {
                (call, client, is_order) = (None, answered, false);
                is_due |= matches!(answer, RouterAnswer::Ordered(..));
                take_answer(&mut model, answer);
            }
            _ = ticks.tick() => is_due = true,
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
        if wanted.is_none() && is_due && call.is_none() {
            is_due = false;
            let detail = model.detail.as_ref().map(|shown| shown.replica.clone());
            wanted = Some(RouterCall::Look { after_event: model.events.last_number(), detail });
        }
        if let Some(wanted) = wanted {
            is_order = matches!(wanted, RouterCall::Order(_));
            call = Some(Box::pin(carry_out(router, client.clone(), wanted)));
        }
    }
}

fn take_answer(model: &mut TopModel, answer: RouterAnswer) {
    match answer {
        RouterAnswer::Seen(fleet, past, detail) => {
            model.events.extend(past);
            model.apply(*fleet, now());
            detail.into_iter().for_each(|detail| model.apply_detail(detail));
        }
        RouterAnswer::Silent(cause) => model.note_silence(cause, now()),
        RouterAnswer::Ordered(order, done) => model.apply_order(&order, done, now()),
    }
}
