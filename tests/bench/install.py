"""Where the programs that hostler is compared with come from: Debian's nginx and haproxy, and releases on PyPI.

What PyPI has goes into an environment of its own below the cache, named by its version, and stays there. Packages of
Debian are installed by `apt-get` where that is allowed (root); there they also come with a service, which is Debian's
and not used here. Whatever cannot be had raises `Missing` with the reason.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hostler" / "peers"
# How long one installation may take, in seconds: the largest is 40 MB.
INSTALL_SECONDS = 300


class Missing(Exception):
    """A program that cannot be had, or does not start; says why."""


@dataclass(frozen=True)
class Debian:
    """A program of the distribution, in the version that it has."""

    package: str
    program: str
    asks_version: tuple[str, ...]
    """Arguments on which the program prints its version."""

    def find(self) -> Path | None:
        """Where the program is; Debian keeps some where only root's PATH looks."""
        found = shutil.which(self.program) or shutil.which(self.program, path="/usr/sbin:/usr/local/sbin")
        return Path(found) if found else None

    def install(self) -> None:
        """Asks apt-get for it."""
        if not shutil.which("apt-get"):
            raise Missing(f"{self.program} is not installed, and there is no apt-get")
        if os.geteuid() != 0:
            raise Missing(f"{self.program} is not installed (apt-get install {self.package})")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-qq"], environment)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", self.package], environment)

    def version(self) -> str:
        """What the program says, such as `2.6.12-1+deb12u4`."""
        said = subprocess.run([self.find(), *self.asks_version], capture_output=True, text=True, timeout=10, check=True)
        words = (said.stdout + said.stderr).splitlines()[0].replace("/", " ").split()
        return next(word for word in words if word[0].isdigit())


@dataclass(frozen=True)
class PyPI:
    """One release on PyPI, in an environment of its own."""

    package: str
    release: str
    program: str

    def find(self) -> Path | None:
        """Where the program is, if the release was installed whole."""
        found = self._folder / "bin" / self.program
        return found if found.is_file() else None

    def install(self) -> None:
        """Makes the environment; one that was left half-made is made anew."""
        shutil.rmtree(self._folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", self._folder], os.environ)
        pip = [self._folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
        try:
            run([*pip, f"{self.package}=={self.release}"], os.environ)
        except Missing:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def version(self) -> str:
        """The release."""
        return self.release

    @property
    def _folder(self) -> Path:
        return CACHE / f"{self.package}-{self.release}"


Package = Debian | PyPI


def run(command: list, environment: dict[str, str]) -> None:
    """Runs a command that installs; its last line is the reason when it fails."""
    words = [str(word) for word in command]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"`{' '.join(words)}` took longer than {INSTALL_SECONDS} s") from None
    if ended.returncode:
        lines = (ended.stderr or ended.stdout).strip().splitlines() or ["it said nothing"]
        raise Missing(f"`{' '.join(words)}` exited {ended.returncode}: {lines[-1]}")
