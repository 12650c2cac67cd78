"""A terminal for the suites, which tmux stands in for: keys go in, and what is on the screen comes out."""

import subprocess
from pathlib import Path

from processes import environment, wait_until

# A key or an event is on the screen within this, in seconds: the router is asked each second, on cores that are shared.
SHOWN_SECONDS = 15


class Screen:
    """A terminal of tmux with a shell's script in it."""

    def __init__(self, folder: Path, script: str, variables: dict[str, str] | None = None):
        """Runs the script on 80 columns and 24 lines."""
        self.tmux = ["tmux", "-S", str(folder / "tmux.sock"), "-f", "/dev/null"]
        command = [*self.tmux, "new-session", "-d", "-x", "80", "-y", "24", "sh", "-c", script]
        subprocess.run(command, env=environment() | (variables or {}), check=True, timeout=10)

    def press(self, *keys: str) -> None:
        """Presses keys by tmux's names of them."""
        subprocess.run([*self.tmux, "send-keys", *keys], check=True, timeout=10)

    def text(self, *options: str) -> str:
        """What is on the screen."""
        command = [*self.tmux, "capture-pane", "-p", *options]
        return subprocess.run(command, check=True, timeout=10, capture_output=True, text=True).stdout

    def row(self, name: str) -> str:
        """The row of a node or a replica in its list, with the mark of the selection; nothing where it has none."""
        starts = (f" {name} ", f">{name} ")
        return next((line for line in self.text().splitlines() if line.startswith(starts)), "")

    def wait(self, *words: str, seconds: float = SHOWN_SECONDS) -> str:
        """Returns the screen once it has all of these words."""

        def shown() -> str | None:
            text = self.text()
            return text if all(word in text for word in words) else None

        try:
            return wait_until(shown, seconds, f"{words} on the screen", pause=0.1)
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.text()}") from None

    def end(self) -> None:
        """Ends the terminal and what runs in it."""
        subprocess.run([*self.tmux, "kill-server"], check=False, timeout=10)
