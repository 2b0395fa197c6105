"""Choose the settings of the baselines on TRAIN scenarios, with the same budget for each of them.

Every baseline gets six settings, every setting the same scenarios and seeds. The score is the geometric mean of the
times to the target, a miss counted as the time limit. The best setting is kept per family, and over all train scenarios
for families that have no train part. The default policy is tuned with six settings too, but compared as it is shipped,
with one setting for all families; the learned policies are built upon it. Held-out scenarios are never read.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from types import MappingProxyType

from dynamix.lab.simulator.episode import code_digest
from dynamix.lab.simulator.scenario import Suite
from dynamix.schemas.messages.allocation import ExchangePermission
from dynamix.schemas.policies import DEFAULT_POLICY

from .rows import GOODPUT, LOCAL_STATIC, TRACKED_STATIC, Choice, Row, Tuned, make_row
from .runs import Ledger, OnProgress, estimate, fill, plan
from .verdict import OutcomeTable

SIZES = (8, 16, 32, 64, 128, 256)
NUM_SETTINGS = 6
DECIMALS = 3
"""Decimals of scores in the file."""
FIRST_SEED = 10_000
"""First seed of tuning; seeds of evaluation count from 0."""


def _rows(policy: str, settings: Sequence[Mapping[str, float | str]]) -> tuple[Row, ...]:
    """Rows of one policy, by their options."""
    return tuple(make_row({"policy": policy, "options": options}) for options in settings)


def _sizes(policy: str, **options: float | str) -> tuple[Row, ...]:
    return tuple(make_row({"policy": policy, "options": options, "local_batch_size": size}) for size in SIZES)


GRID: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        "static": _sizes("static"),
        TRACKED_STATIC: _sizes("static", track=1),
        "proportional": _sizes("proportional"),
        "omnilearn": _sizes("omnilearn"),
        "noise-scale": _rows(
            "noise-scale", [{"multiplier": factor, "track": 1} for factor in (0.125, 0.25, 0.5, 1, 2, 4)]
        ),
        GOODPUT: _rows(
            GOODPUT,
            [
                {"noise_multiplier": 1, "hysteresis": 0.05, "track": 0},
                *({"noise_multiplier": noise, "hysteresis": 0.05, "track": 1} for noise in (1, 2, 4)),
                *({"noise_multiplier": noise, "hysteresis": 0, "track": 1} for noise in (2, 4)),
            ],
        ),
        "doubling": _rows(
            "doubling",
            [
                *({"every_samples": samples, "track": 1} for samples in (30_000, 60_000, 120_000)),
                *({"patience_windows": windows, "track": 1} for windows in (1, 3, 10)),
            ],
        ),
        DEFAULT_POLICY: _rows(
            DEFAULT_POLICY,
            [
                {"noise_multiplier": noise, "rate_weight": weight}
                for noise, weight in ((1, 0), (2, 0), (4, 0), (1, 0.5), (1, 1), (0.5, 1))
            ],
        ),
    }
)
"""Six settings per baseline: the batch size where it is constant, else the most important options.

Goodput's begin with Pollux's rule, split by speed once per window; the others have what the default policy has: the
fast loop and a factor on the noise scale. So have noise-scale and doubling.
"""
_INT8 = {"codec": "int8"}
_TRACK = {"track": 1}
EXCHANGE_GRID: Mapping[str, tuple[Row, ...]] = MappingProxyType(
    {
        LOCAL_STATIC: _sizes("static", every=4, codec="int8", track=1),
        "diloco": _rows(
            "diloco",
            [
                {**_INT8, "every": every, "outer_rate": rate, "outer_momentum": momentum, **_TRACK}
                for every in (4, 8, 16)
                for rate, momentum in ((0.7, 0.9), (1, 0.5))
            ],
        ),
        "qsr": _rows(
            "qsr",
            [{**_INT8, "h_min": least, "alpha": rate, **_TRACK} for least in (2, 4) for rate in (0.1, 0.2, 0.4)],
        ),
        "adacomm": _rows(
            "adacomm",
            [{**_INT8, "tau_0": tau, "interval": windows, **_TRACK} for tau in (4, 8, 16) for windows in (5, 20)],
        ),
        "accordion": _rows(
            "accordion",
            [
                {"mild": "none", "eta": eta, "interval": windows, **_TRACK}
                for eta in (0.1, 0.25, 0.5)
                for windows in (5, 20)
            ],
        ),
        "gravac": _rows(
            "gravac", [{"trial": trial, "hold": hold, **_TRACK} for trial in (3, 5) for hold in (25, 100, 400)]
        ),
    }
)
"""The same for policies that decide the communication, in jobs that permit local steps. All have the fast loop and,
where they choose no codec themselves, `int8`."""


def tune(
    suite: Suite,
    ledger: Ledger,
    *,
    seeds: Sequence[int],
    baselines: Sequence[str] = tuple(GRID),
    exchange: ExchangePermission | None = None,
    command: str = "",
    jobs: int = 1,
    data: Path | None = None,
    on_estimate: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Tuned:
    """Run the grid on the scenarios of a suite and choose the best settings.

    `exchange` is what all jobs permit, for baselines of `EXCHANGE_GRID`.

    Raises:
        ValueError: when a baseline has no grid, or jobs do not permit what it needs.
        EpisodeError: when an episode raises.
    """
    known = {**GRID, **EXCHANGE_GRID}
    if unknown := [baseline for baseline in baselines if baseline not in known]:
        raise ValueError(f"{unknown[0]!r} has no settings to tune: choose from {', '.join(known)}")
    grid = {baseline: known[baseline] for baseline in baselines}
    rows = [setting for settings in grid.values() for setting in settings]
    if exchange is not None:
        rows = [row.permitted(exchange) for row in rows]
    cells = plan(suite, rows, seeds, Tuned())
    if on_estimate is not None:
        on_estimate(estimate(cells, ledger, jobs=jobs))
    fill(cells, ledger, jobs=jobs, data=data, on_progress=on_progress)
    table = OutcomeTable(suite.scenarios, cells, ledger)

    def choice(settings: Sequence[Row], families: Sequence[str]) -> Choice:
        """The best setting; the first of equally good ones."""
        scores = {
            setting.label: geometric_mean(  # families count alike
                geometric_mean(table.times(setting.label, [family]).ravel()) for family in families
            )
            for setting in settings
        }
        best = min(settings, key=lambda setting: scores[setting.label])
        return Choice(
            setting=best.label,
            options=best.options,
            initial_local_batch_size=best.local_batch_size,
            score_s=round(scores[best.label], DECIMALS),
            scores_s={label: round(score, DECIMALS) for label, score in scores.items()},
            misses={setting.label: table.num_misses(setting.label, families) for setting in settings},
        )

    def choices(families: Sequence[str]) -> dict[str, Choice]:
        return {baseline: choice(settings, families) for baseline, settings in grid.items()}

    return Tuned(
        command=command,
        scenarios=suite.digest,
        code=code_digest(),
        seeds=list(seeds),
        num_settings=NUM_SETTINGS,
        families={family: choices([family]) for family in suite.families},
        overall=choices(list(suite.families)),
    )
