"""What a case is: something done to the service, what must be seen, and by how much the service may grow meanwhile."""

import dataclasses
from collections.abc import Callable

from target import GROWTH


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    group: str
    name: str
    expected: str
    run: Callable
    """Does it and returns what it saw; raises AssertionError with what it saw where that is wrong."""
    growth: int
    """MiB by which the process may grow."""
    inflates: bool
    """Whether it needs the service that undoes compression."""
    keyed: bool
    """Whether it needs the service that wants a key, of which there is one for one model."""


def case(
    group: str, name: str, expected: str, run: Callable, growth: int = GROWTH, inflates: bool = False, keyed: bool = False
) -> Case:
    """A case with the usual bounds."""
    return Case(group, name, expected, run, growth, inflates, keyed)


def check(holds, seen) -> None:
    """Fails a case with what it saw."""
    assert holds, str(seen)
