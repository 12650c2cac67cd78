//! The terminal, taken for the view and always given back: at the end, at an error, at a panic, and
//! while the shell has it.

use std::io::{IsTerminal, stdin, stdout};

use anyhow::bail;
use crossterm::execute;
use crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::DefaultTerminal;
use rustix::process::{Signal, getpid, kill_process};

/// Rejects terminals on which nothing can be drawn.
///
/// # Errors
/// The error says what to use instead.
pub(super) fn check_terminal() -> anyhow::Result<()> {
    let term = std::env::var("TERM").unwrap_or_default();
    check(stdin().is_terminal() && stdout().is_terminal(), &term)
}

fn check(is_terminal: bool, term: &str) -> anyhow::Result<()> {
    if !is_terminal {
        bail!("`hostler top` needs a terminal, and input or output is none: use `hostler ps`, or `hostler ps --json` in scripts");
    }
    if matches!(term, "" | "dumb") {
        bail!("`hostler top` cannot draw on a terminal of the kind {term:?} (TERM): use `hostler ps`, or set TERM to what the terminal is");
    }
    Ok(())
}

/// Whether colours are wanted, according to <https://no-color.org>.
pub(super) fn has_color() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Terminal that is given back on drop.
#[derive(Debug)]
pub(super) struct TakenTerminal {
    pub(super) terminal: DefaultTerminal,
}

impl TakenTerminal {
    /// Takes the terminal. A panic gives it back before its message is written.
    ///
    /// # Errors
    /// When the terminal cannot be drawn on.
    pub(super) fn take() -> anyhow::Result<Self> {
        let taken = ratatui::try_init().inspect_err(|_| give_back())?;
        Ok(Self { terminal: taken })
    }

    /// Gives the terminal to the shell until this program is continued.
    ///
    /// # Errors
    /// When the terminal cannot be taken again.
    pub(super) fn suspend(&mut self) -> anyhow::Result<()> {
        self.terminal.show_cursor()?;
        give_back();
        kill_process(getpid(), Signal::TSTP)?;
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen)?;
        self.terminal.clear()?;
        Ok(())
    }
}

impl Drop for TakenTerminal {
    fn drop(&mut self) {
        let _ = self.terminal.show_cursor();
        // A panic has already given it back; once more would put the cursor over the panic's
        // message.
        if !std::thread::panicking() {
            give_back();
        }
    }
}

/// Gives the terminal back. If it is gone, an error does no harm.
fn give_back() {
    let _ = ratatui::try_restore();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsuitable_terminal_is_refused_with_the_alternative() {
        assert!(check(true, "xterm-256color").is_ok());
        for (is_terminal, term) in [(false, "xterm"), (true, "dumb"), (true, "")] {
            let refused = check(is_terminal, term).unwrap_err().to_string();
            assert!(refused.contains("use `hostler ps`"), "{refused}");
        }
    }
}
