//! Styles, with and without colours. A colour only repeats what a word says.

use hostler_proto::agent::v1::Phase;
use ratatui::style::{Color, Modifier, Style};

#[derive(Debug, Clone, Copy)]
pub(super) struct Palette {
    pub(super) has_color: bool,
}

impl Palette {
    pub(super) fn plain(self) -> Style {
        Style::default()
    }

    pub(super) fn strong(self) -> Style {
        Style::default().add_modifier(Modifier::BOLD)
    }

    pub(super) fn label(self) -> Style {
        self.colored(Color::Cyan)
    }

    /// Heading of a list. The list in which keys move stands out.
    pub(super) fn heading(self, is_focused: bool) -> Style {
        let style = self.strong().add_modifier(Modifier::UNDERLINED);
        if is_focused { style.patch(self.colored(Color::Cyan)) } else { style }
    }

    pub(super) fn selected(self) -> Style {
        Style::default().add_modifier(Modifier::REVERSED)
    }

    pub(super) fn alarm(self) -> Style {
        self.colored(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Style of outdated figures.
    pub(super) fn old(self) -> Style {
        Style::default().add_modifier(Modifier::DIM)
    }

    pub(super) fn phase(self, phase: Phase) -> Style {
        match phase {
            Phase::Ready => self.colored(Color::Green),
            Phase::Failed | Phase::Quarantined => self.alarm(),
            Phase::Suspect | Phase::Draining => self.colored(Color::Yellow).add_modifier(Modifier::BOLD),
            Phase::Unspecified | Phase::Starting | Phase::Loading => self.colored(Color::Yellow),
            Phase::Stopped | Phase::Sleeping => self.plain(),
        }
    }

    /// Style of a level: a warning from `high` on, an alarm from `full` on.
    pub(super) fn level(self, value: f64, (high, full): (f64, f64)) -> Style {
        if value >= full {
            self.colored(Color::Red)
        } else if value >= high {
            self.colored(Color::Yellow)
        } else {
            self.plain()
        }
    }

    fn colored(self, color: Color) -> Style {
        if self.has_color { Style::default().fg(color) } else { Style::default() }
    }
}
