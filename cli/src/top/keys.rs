//! Effect of a key: it changes the model, or asks for something that only the loop can do.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::model::{KeyMode, Panel, ReplicaDetail, TopModel};
use super::order::{FleetOrder, OrderKind, Question};

/// Rows of a page: half of the smallest screen.
const PAGE: usize = 10;

/// Most letters of a filter.
const MAX_FILTER: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeyIntent {
    Quit,
    /// Give the terminal to the shell until it continues this program.
    Suspend,
    /// Draw every cell again: something else has written to the terminal.
    Redraw,
    /// Ask the router now instead of at the next tick.
    Look,
    Order(FleetOrder),
}

impl TopModel {
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<KeyIntent> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Some(KeyIntent::Quit),
                KeyCode::Char('z') => Some(KeyIntent::Suspend),
                KeyCode::Char('l') => Some(KeyIntent::Redraw),
                _ => None,
            };
        }
        match &self.mode {
            KeyMode::Browse => self.press_in_lists(key.code),
            KeyMode::Filter => {
                self.type_filter(key.code);
                None
            }
            KeyMode::Ask(question) => {
                let order = question.order.clone();
                self.mode = KeyMode::Browse;
                if matches!(key.code, KeyCode::Char('y' | 'Y')) {
                    return Some(KeyIntent::Order(order));
                }
                self.notice = "nothing was ordered".to_owned();
                None
            }
            KeyMode::Help => {
                self.mode = KeyMode::Browse;
                None
            }
        }
    }

    fn press_in_lists(&mut self, code: KeyCode) -> Option<KeyIntent> {
        self.notice.clear();
        match code {
            KeyCode::Char('q') => return Some(KeyIntent::Quit),
            KeyCode::Esc => return self.leave(),
            KeyCode::Enter => return self.open(),
            KeyCode::Char('?') => self.mode = KeyMode::Help,
            KeyCode::Char('d') => self.ask(OrderKind::Drain),
            KeyCode::Char('r') => self.ask(OrderKind::Restart),
            KeyCode::Char('l') => self.ask(OrderKind::Release),
            _ if self.detail.is_some() => {}
            KeyCode::Char('/') => {
                self.panel = Panel::Replicas;
                self.mode = KeyMode::Filter;
            }
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.is_reversed = false;
            }
            KeyCode::Char('S') => self.is_reversed = !self.is_reversed,
            KeyCode::Tab | KeyCode::BackTab => {
                self.panel = if self.panel == Panel::Replicas { Panel::Nodes } else { Panel::Replicas };
            }
            _ => self.move_selection(code),
        }
        None
    }

    fn move_selection(&mut self, code: KeyCode) {
        let row = self.selected_row(self.panel).unwrap_or_default();
        match code {
            KeyCode::Down | KeyCode::Char('j') => self.select(row + 1),
            KeyCode::Up | KeyCode::Char('k') => self.select(row.saturating_sub(1)),
            KeyCode::PageDown => self.select(row + PAGE),
            KeyCode::PageUp => self.select(row.saturating_sub(PAGE)),
            KeyCode::Home | KeyCode::Char('g') => self.select(0),
            KeyCode::End | KeyCode::Char('G') => self.select(usize::MAX),
            _ => {}
        }
    }

    /// Goes one step back: out of a replica, then of a filter, then of the program.
    fn leave(&mut self) -> Option<KeyIntent> {
        if self.detail.take().is_some() {
            return None;
        }
        if self.filter.is_empty() {
            return Some(KeyIntent::Quit);
        }
        self.filter.clear();
        self.keep_selection();
        None
    }

    /// Opens a replica; for a node, moves to its replicas.
    fn open(&mut self) -> Option<KeyIntent> {
        if self.detail.is_some() {
            return None;
        }
        match (self.panel, self.target()) {
            (Panel::Replicas, Some(replica)) => {
                self.detail = Some(ReplicaDetail { replica, log: Ok(Vec::new()), decisions: Ok(Vec::new()) });
                Some(KeyIntent::Look)
            }
            (Panel::Nodes, Some(node)) => {
                self.filter = format!("{node}/");
                self.panel = Panel::Replicas;
                self.keep_selection();
                None
            }
            (_, None) => None,
        }
    }

    /// Asks before an order. Nothing is ordered without a question, or based on old figures.
    fn ask(&mut self, kind: OrderKind) {
        let (Some(fleet), Some(target)) = (self.picture(), self.target()) else { return };
        if self.silence.is_some() {
            self.notice = format!("cannot {} {target}: the router does not answer", kind.as_str());
            return;
        }
        match Question::new(FleetOrder { kind, target }, fleet) {
            Some(question) => self.mode = KeyMode::Ask(question),
            None => self.notice = format!("there is no replica to {} here", kind.as_str()),
        }
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.mode = KeyMode::Browse,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = KeyMode::Browse;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) if self.filter.chars().count() < MAX_FILTER => self.filter.push(letter),
            _ => {}
        }
        self.keep_selection();
    }
}
