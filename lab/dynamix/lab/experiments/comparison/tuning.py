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

from dynamix.lab.experiments.episodes.provenance import code_digest
from dynamix.lab.experiments.episodes.suite import Suite
from dynamix.schemas.messages.allocation import ExchangePermission
from dynamix.schemas.messages.policies import DEFAULT_POLICY

from .contenders import GOODPUT, LOCAL_STATIC, TRACKED_STATIC, Contender, parse_contender
from .evaluation import ComparisonProgress, Estimate, estimate, fill, plan
from .outcomes import OutcomeTable
from .runs import Ledger
from .tuned import Choice, Tuned

SIZES = (8, 16, 32, 64, 128, 256)
NUM_SETTINGS = 6
DECIMALS = 3
"""Decimals of scores in the file."""
FIRST_SEED = 10_000
"""First seed of tuning; seeds of evaluation count from 0."""

GRID: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "static": tuple(f"static@{size}" for size in SIZES),
        TRACKED_STATIC: tuple(f"static+track@{size}" for size in SIZES),
        "proportional": tuple(f"proportional@{size}" for size in SIZES),
        "omnilearn": tuple(f"omnilearn@{size}" for size in SIZES),
        "noise-scale": tuple(f"noise-scale+track:multiplier={factor}" for factor in (0.125, 0.25, 0.5, 1, 2, 4)),
        GOODPUT: (
            f"{GOODPUT}:noise_multiplier=1,hysteresis=0.05,track=0",
            *(f"{GOODPUT}+track:noise_multiplier={noise},hysteresis=0.05" for noise in (1, 2, 4)),
            *(f"{GOODPUT}+track:noise_multiplier={noise},hysteresis=0" for noise in (2, 4)),
        ),
        "doubling": tuple(
            f"doubling+track:{when}"
            for when in (
                *(f"every_samples={samples}" for samples in (30_000, 60_000, 120_000)),
                *(f"patience_windows={windows}" for windows in (1, 3, 10)),
            )
        ),
        DEFAULT_POLICY: tuple(
            f"{DEFAULT_POLICY}:noise_multiplier={noise},rate_weight={weight}"
            for noise, weight in ((1, 0), (2, 0), (4, 0), (1, 0.5), (1, 1), (0.5, 1))
        ),
    }
)
"""Six settings per baseline: the batch size where it is constant, else the most important options.

Goodput's begin with Pollux's own rule, split by speed once per window; the others have what the default policy has: the
fast loop and a factor on the noise scale. So have noise-scale and doubling.
"""


EXCHANGE_GRID: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        LOCAL_STATIC: tuple(f"static+track:every=4,codec=int8@{size}" for size in SIZES),
        "diloco": tuple(
            f"diloco+track:codec=int8,every={every},outer_rate={rate},outer_momentum={momentum}"
            for every in (4, 8, 16)
            for rate, momentum in ((0.7, 0.9), (1, 0.5))
        ),
        "qsr": tuple(
            f"qsr+track:codec=int8,h_min={least},alpha={rate}" for least in (2, 4) for rate in (0.1, 0.2, 0.4)
        ),
        "adacomm": tuple(
            f"adacomm+track:codec=int8,tau_0={tau},interval={windows}" for tau in (4, 8, 16) for windows in (5, 20)
        ),
        "accordion": tuple(
            f"accordion+track:mild=none,eta={eta},interval={windows}" for eta in (0.1, 0.25, 0.5) for windows in (5, 20)
        ),
        "gravac": tuple(f"gravac+track:trial={trial},hold={hold}" for trial in (3, 5) for hold in (25, 100, 400)),
    }
)
"""The same for what decides exchanges, in jobs that permit local steps. All have the fast loop and, where they choose
none themselves, the codec `int8`."""


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
    on_estimate: Callable[[Estimate], None] | None = None,
    on_progress: Callable[[ComparisonProgress], None] | None = None,
) -> Tuned:
    """Run the grid on the scenarios of a suite and choose the best settings.

    `exchange` is what all jobs permit, for baselines of `EXCHANGE_GRID`.

    Raises:
        ValueError: when a baseline has no grid, or jobs do not permit what it needs.
        EpisodeError: when an episode raises.
    """
    grid = {baseline: [parse_contender(text) for text in _settings(baseline)] for baseline in baselines}
    rows = [setting for settings in grid.values() for setting in settings]
    if exchange is not None:
        rows = [row.permitted(exchange) for row in rows]
    cells = plan(suite, rows, seeds, Tuned())
    if on_estimate is not None:
        on_estimate(estimate(cells, ledger))
    fill(cells, ledger, jobs=jobs, data=data, on_progress=on_progress)
    table = OutcomeTable(suite.scenarios, cells, ledger)
    return Tuned(
        command=command,
        scenarios=suite.digest,
        code=code_digest(),
        seeds=list(seeds),
        num_settings=NUM_SETTINGS,
        families={family: _choices(table, grid, [family]) for family in suite.families},
        overall=_choices(table, grid, list(suite.families)),
    )


def score_s(table: OutcomeTable, label: str, families: Sequence[str]) -> float:
    """Return the geometric mean of a setting's times, families weighted equally."""
    return geometric_mean(geometric_mean(table.times(label, [family]).ravel()) for family in families)


def _settings(baseline: str) -> tuple[str, ...]:
    try:
        return {**GRID, **EXCHANGE_GRID}[baseline]
    except KeyError:
        known = ", ".join((*GRID, *EXCHANGE_GRID))
        raise ValueError(f"{baseline!r} has no settings to tune: choose from {known}") from None


def _choices(
    table: OutcomeTable, grid: Mapping[str, Sequence[Contender]], families: Sequence[str]
) -> dict[str, Choice]:
    return {baseline: _choice(table, settings, families) for baseline, settings in grid.items()}


def _choice(table: OutcomeTable, settings: Sequence[Contender], families: Sequence[str]) -> Choice:
    """Return the best setting; the first of equally good ones."""
    found = {setting.label: score_s(table, setting.label, families) for setting in settings}
    best = min(settings, key=lambda setting: found[setting.label])
    return Choice(
        setting=best.label,
        options=best.options,
        initial_local_batch_size=best.initial_local_batch_size,
        score_s=round(found[best.label], DECIMALS),
        scores_s={label: round(score, DECIMALS) for label, score in found.items()},
        misses={setting.label: table.num_misses(setting.label, families) for setting in settings},
    )
