"""Experiments on the published reward: its weights, the window, and how an episode ends."""

from collections.abc import Sequence
from typing import Any

import msgspec
from bench.harness.figure import Curve, Panel

from dynamix.lab.simulator.scenario import Scenario
from dynamix.reward.formula import Weights

from .laboratory import Laboratory, LearningRun
from .learned import ADAM, PAPER
from .result import BASE, COLUMNS, Cell, ExperimentResult, cells_of, ratio_of

FACTORS = (0.0, 1.0, 10.0)
"""On each weight of the published reward, the others as they are by default."""
ENDS = {"target": "target", "fixed": "fixed time"}
WINDOWS = (5, 10, 20)
DEFAULT_WINDOW = 10
PUBLISHED = Weights()


def sensitivity(laboratory: Laboratory) -> ExperimentResult:
    """Each weight at 0, 1 and 10 times its default, the others unchanged, and k at 5, 10, 20; eta with Adam."""
    rows: list[list[Cell]] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for parameter, value, scenario, changes in _settings(laboratory):
        learned = laboratory.learned(PAPER, [scenario], **changes)
        table = laboratory.compare([scenario], [PAPER, BASE], {PAPER: learned})
        rows.append([parameter, value, *cells_of(table, PAPER, scenario)])
        if (ratio := ratio_of(table, PAPER, scenario)) is not None:
            place = sum(row[0] == parameter for row in rows) - 1
            points.setdefault(parameter, []).append((place, ratio.value))
    curves = [Curve(label=name, points=found) for name, found in points.items() if name != "k"]
    places = [f"{factor:g} x default" for factor in FACTORS]
    panel = Panel(
        title=f"Time to target against {BASE}", x="weight", y="ratio", curves=curves, limit=1.0, places=places
    )
    return laboratory.result(
        "sensitivity",
        ["parameter", "value", *COLUMNS],
        rows,
        learned=True,
        panels=[panel],
        notes=[_default_weights()],
    )


def published_reward(laboratory: Laboratory) -> ExperimentResult:
    """Why the published reward does what it does: episodes that end at the target or after a fixed time, by weights."""
    scenario = laboratory.cluster("home")
    variants = {
        "as published": PUBLISHED,
        "no size penalty": _with(delta=0.0),
        "no time penalty": _with(beta=0.0),
        "no level of accuracy": _with(accuracy=0.0),
        "time and rise only": _with(accuracy=0.0, delta=0.0),
    }
    rows: list[list[Cell]] = []
    panels = []
    for end, end_words in ENDS.items():
        curves = []
        for title, weights in variants.items():
            learned = laboratory.learned(PAPER, [scenario], weights=weights, episode_end=end)
            table = laboratory.compare([scenario], [PAPER, BASE], {PAPER: learned})
            rows.append([end_words, title, _return(learned), *cells_of(table, PAPER, scenario)])
            curves.append(_mean_return_curve(title, learned))
        panels.append(Panel(title=f"Episodes that end at the {end_words}", x="episode", y="return", curves=curves))
    columns = ["episode ends at", "reward", "return, last episodes", *COLUMNS]
    return laboratory.result("reward", columns, rows, learned=True, panels=panels, notes=[_default_weights()])


def _settings(laboratory: Laboratory) -> list[tuple[str, float, Scenario, dict[str, Any]]]:
    """Parameter, value, scenario and what changes in the learning plan; the default of a scenario is learned once."""
    sgd, adam = laboratory.cluster("home"), laboratory.cluster("home-adam", **ADAM)
    found: list[tuple[str, float, Scenario, dict[str, Any]]] = []
    for name in ("alpha", "beta", "delta", "eta"):
        for factor in FACTORS:
            value = factor * getattr(PUBLISHED, name)
            found.append((name, value, adam if name == "eta" else sgd, {"weights": _with(**{name: value})}))
    for window_steps in WINDOWS:
        scenario = sgd if window_steps == DEFAULT_WINDOW else laboratory.cluster(
            f"home-k{window_steps}", window_steps=window_steps
        )  # fmt: skip
        found.append(("k", float(window_steps), scenario, {"weights": PUBLISHED}))
    return found


def _with(**changes: float) -> Weights:
    return msgspec.structs.replace(PUBLISHED, **changes)


def _default_weights() -> str:
    weights = ", ".join(f"{name} = {getattr(PUBLISHED, name):g}" for name in Weights.__struct_fields__)
    return f"No weight is published; ours by default: {weights}. Learned by `{PAPER}`, evaluated without exploring."


def _return(learned: Sequence[LearningRun]) -> float:
    """Mean of the last quarter of the episodes, over learning seeds."""
    values = [update.mean_return for run in learned for update in run.history[-max(1, len(run.history) // 4) :]]
    return sum(values) / len(values)


def _mean_return_curve(label: str, learned: Sequence[LearningRun]) -> Curve:
    rows = zip(*(run.history for run in learned), strict=True)
    points = [
        (float(updates[0].num_episodes), sum(update.mean_return for update in updates) / len(updates))
        for updates in rows
    ]
    return Curve(label=label, points=points)
