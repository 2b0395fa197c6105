"""Levers on `rule` without a closed form: learned over clusters drawn at random, judged once on held-out families.

The families to judge by differ from those to learn from in what no draw of these has: more workers, a link of its own
that is slow, links that congest one by one, another model, labels of which more are wrong. Nothing was chosen by them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from bench.harness.figure import Panel

from dynamix.lab.experiments.comparison.outcomes import OutcomeTable
from dynamix.lab.experiments.comparison.scores import MeanInterval
from dynamix.lab.experiments.learning.variation import FAMILIES, drawn_scenarios
from dynamix.lab.simulator.scenario import Congestion, Scenario, Workers

from .laboratory import SMOKE, Laboratory, LearningRun
from .result import Cell, ExperimentResult

POLICY, ROW, RULE = "levers", "levers+track", "rule"
"""The row's job asks for what the name of a shipped policy says: the ranks divide the batch from the first step on."""
TRAIN_SEED, HELD_OUT_SEED = 0, 1
EACH, EACH_HELD_OUT = 6, 2
"""Clusters of each family."""
EPISODES_RATIO = 42
"""Episodes of a learning, over those of the scale."""
SLOW_LINK_MBIT_S = 300.0
COLUMNS = ["family", "median time of rule, s", "missed by rule", "missed by levers", "time over that of rule", "clear"]


def _held_out(family: str, **changes: Any) -> list[Scenario]:
    return drawn_scenarios(family, EACH_HELD_OUT, seed=HELD_OUT_SEED, **changes)


def _with_slow_link(scenario: Scenario) -> Scenario:
    first, *others = scenario.workers
    slow = Workers(samples_per_s=first.samples_per_s, overhead_s=first.overhead_s, bandwidth_mbit_s=SLOW_LINK_MBIT_S)
    return msgspec.structs.replace(scenario, workers=(slow, *others))


def _with_own_bursts(scenario: Scenario) -> Scenario:
    assert scenario.congestion is not None
    return msgspec.structs.replace(
        scenario, exchange="local", congestion=msgspec.structs.replace(scenario.congestion, shared=False)
    )


LONG_BURSTS = Congestion(factor=10.0, mean_clear_s=10.0, mean_congested_s=10.0, retransmits_per_s=200.0)
HELD_OUT: Mapping[str, Callable[[], list[Scenario]]] = MappingProxyType(
    {
        "labels": partial(_held_out, "noise", num_workers=8, label_noise=0.25, target_accuracy=0.8),
        "model": partial(_held_out, "local", workload="fashion-28-mlp"),
        "slow-link": lambda: list(map(_with_slow_link, _held_out("local", num_workers=8))),
        "own-bursts": lambda: list(map(_with_own_bursts, _held_out("bursts", num_workers=8))),
        "long-bursts": partial(_held_out, "bursts", exchange="lossy", congestion=LONG_BURSTS),
        "drift-8": partial(_held_out, "drift", num_workers=8),
    }
)
"""Written down before anything was learned, and not changed since."""


def learned_levers(laboratory: Laboratory) -> ExperimentResult:
    """Levers on the rule, learned over clusters drawn at random, against the rule on families held out."""
    small = SMOKE | {"time_limit_s": 4.0} if laboratory.scale.name == "smoke" else {}
    train = [
        msgspec.structs.replace(scenario, **small)
        for family in FAMILIES
        for scenario in drawn_scenarios(family, 1 if small else EACH, seed=TRAIN_SEED)
    ]
    runs = laboratory.learned(
        POLICY,
        train,
        num_episodes=len(train) if small else EPISODES_RATIO * laboratory.scale.num_episodes,
        episodes_per_update=len(train),
        num_validation_seeds=1,
    )
    scenarios = [
        msgspec.structs.replace(scenario, family=family, name=f"{family}-{number}", **small)
        for family, draw in HELD_OUT.items()
        for number, scenario in enumerate(draw()[: 1 if small else None])
    ]
    table = laboratory.compare(scenarios, [RULE, ROW], {POLICY: runs})
    rows = [_row(table, family, [family]) for family in HELD_OUT]
    verdict = _verdict(rows)
    rows.append(_row(table, "all families", list(HELD_OUT)))
    return laboratory.result(
        "levers",
        COLUMNS,
        [*rows, _random_row(table)],
        learned=True,
        panels=_panels(laboratory, runs),
        notes=[verdict, _course(runs, len(train)), laboratory.tuning_note([RULE])],
    )


def _row(table: OutcomeTable, title: str, families: Sequence[str]) -> list[Cell]:
    found = table.ratio(ROW, RULE, families)
    ratio = None if found is None else MeanInterval(found.ratio, found.low, found.high)
    return [
        title,
        float(np.nanmedian(table.times(RULE, families))),
        _misses(table, RULE, families),
        _misses(table, ROW, families),
        ratio,
        _clear(ratio),
    ]


def _random_row(table: OutcomeTable) -> list[Cell]:
    """All families, as a sample of those there could be."""
    found = table.ratio(ROW, RULE, list(HELD_OUT))
    ratio = None if found is None else MeanInterval(found.ratio, found.family_low, found.family_high)
    return ["families as a sample of others", None, None, None, ratio, _clear(ratio)]


def _misses(table: OutcomeTable, label: str, families: Sequence[str]) -> str:
    return f"{table.num_misses(label, families)} of {len(table.outcomes(label, families))}"


def _clear(ratio: MeanInterval | None) -> str:
    """On which side of 1 an interval is as a whole."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return "-"
    return "faster" if ratio.high < 1.0 else "slower" if ratio.low > 1.0 else "no"


def _verdict(rows: Sequence[Sequence[Cell]]) -> str:
    """The target and what came of it."""
    faster, slower = ([str(row[0]) for row in rows if row[-1] == side] for side in ("faster", "slower"))
    outcome = "missed, and `rule` stays the default" if slower or not faster else "met"
    return (
        "Target: faster than `rule` in at least one family, with an interval clear of 1, and slower in none. "
        f"It is {outcome}: clearly faster in {_named(faster)}, clearly slower in {_named(slower)}."
    )


def _named(families: Sequence[str]) -> str:
    return ", ".join(f"`{family}`" for family in families) or "none"


def _course(runs: Sequence[LearningRun], num_scenarios: int) -> str:
    """How much was learned, and how fast."""
    episodes = sum(run.history[-1].num_episodes for run in runs)
    elapsed_s = sum(run.elapsed_s for run in runs)
    return (
        f"Learned from {episodes} episodes, each under a seed of its own, on {num_scenarios} clusters; "
        f"{episodes / elapsed_s:.1f} episodes per second with their updates."
    )


def _panels(laboratory: Laboratory, runs: Sequence[LearningRun]) -> list[Panel]:
    return [
        Panel(title=title, x="episode", y=y, curves=laboratory.curves(runs, value), limit=limit)
        for title, y, value, limit in (
            ("Time of episodes over that of rule (drawn actions)", "ratio", lambda update: update.vs_rule, 1.0),
            ("Entropy of the network's actions", "nats", lambda update: update.entropy, None),
        )
    ]
