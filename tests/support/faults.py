"""What fault tests share: how much of a fault (`--faults=quick|full`), a seed, figures for `make faults`.

A pytest plugin (see tests/conftest.py). `quick`, the default, scales the counts down to what `make test` has time for.
"""

import random
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")


class Scale(NamedTuple):
    """Chooses between the counts of `make test` and those of `make faults`."""

    is_full: bool

    def __call__(self, quick: T, full: T) -> T:
        return full if self.is_full else quick


Figure = Callable[[str, object], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption(
        "--faults", choices=("quick", "full"), default="quick", help="how much of each fault (tests/faults)"
    )
    group.addoption("--faults-seed", type=int, default=0, help="seed of when faults happen, and to whom")


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> Scale:
    """How much of a fault this run can afford."""
    return Scale(request.config.getoption("--faults") == "full")


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Decides when and to whom; the same seed decides the same."""
    return random.Random(f"{request.config.getoption('--faults-seed')}:{request.node.name}")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Keeps a measured number for the table of `make faults`, and shows it beside the test's output."""

    def keep(name: str, value: object) -> None:
        record_property(name, value)
        print(f"{name}: {value}")  # noqa: T201 - pytest keeps it for a failed test

    return keep
