"""Suites: the scenarios of a directory, by family, and the hash of their content."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from dynamix.lab.simulator.scenario import Scenario, scenarios_in

TRAIN = "train"
HELD_OUT = "heldout"
SUITES = (HELD_OUT, TRAIN)
TUNED_FILE = "tuned.toml"
TUNED_EXCHANGE_FILE = "tuned-exchange.toml"


class Suite(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Scenarios that are evaluated together."""

    name: str
    scenarios: tuple[Scenario, ...]

    @cached_property
    def families(self) -> dict[str, tuple[Scenario, ...]]:
        """The scenarios of each family, families in alphabetical order."""
        names = sorted({scenario.family for scenario in self.scenarios})
        return {name: tuple(found for found in self.scenarios if found.family == name) for name in names}

    @property
    def heterogeneous_families(self) -> list[str]:
        """Names of the families that are not a control."""
        return [name for name, scenarios in self.families.items() if not is_control(scenarios)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content of all its scenarios."""
        return hashlib.sha256("".join(sorted(map(digest_of, self.scenarios))).encode()).hexdigest()


def digest_of(scenario: Scenario) -> str:
    """Return the SHA-256 of a scenario's content; comments and the order of keys do not change it."""
    return hashlib.sha256(msgspec.json.encode(scenario.content, order="sorted")).hexdigest()


def is_homogeneous(scenario: Scenario) -> bool:
    """Whether all workers are alike and stay alike: no stragglers, congestion or changes. Jitter is allowed."""
    kinds = {msgspec.structs.replace(workers, count=1) for workers in scenario.workers}
    disturbances = (scenario.stragglers, scenario.congestion)
    alike = len(kinds) == 1 and not scenario.speed_changes
    return alike and all(disturbance is None or disturbance.factor == 1.0 for disturbance in disturbances)


def is_control(scenarios: Sequence[Scenario]) -> bool:
    """Whether a family is the control: nothing in any of its scenarios can be improved by a controller."""
    return all(map(is_homogeneous, scenarios))


def scenario_root() -> Path:
    """Directory of the scenarios that come with the package, or of this checkout.

    Raises:
        ValueError: when neither is there.
    """
    here = Path(__file__).resolve()
    places = (here.parents[2] / "scenarios", here.parents[5] / "scenarios")
    for place in places:
        if place.is_dir():
            return place
    raise ValueError(f"no scenarios in {places[0]} nor {places[1]}: name a directory with --scenarios DIR")


def suite_named(name: str) -> Suite:
    """One of the suites that come with the package: `heldout` or `train`.

    Raises:
        ValueError: when it is neither, or one of its files is no scenario.
    """
    if name not in SUITES:
        raise ValueError(f"no suite is called {name!r}: choose {' or '.join(SUITES)}, or a directory with --scenarios")
    return read_suite(scenario_root() / name, name)


def read_suite(directory: Path, name: str | None = None) -> Suite:
    """The scenarios of a directory's *.toml files, sorted by name.

    Raises:
        ValueError: when there is none, or a file is no scenario; the text names the file.
    """
    return Suite(name=name or directory.resolve().name, scenarios=tuple(scenarios_in(directory)))
