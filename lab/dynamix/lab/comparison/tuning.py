"""Choose the settings of the baselines on TRAIN scenarios, with the same budget for each of them.

Every baseline gets six settings (`scenarios/rows/tune*.toml`), every setting the same scenarios and seeds. The score is
the geometric mean of the times to the target, a miss counted as the time limit. The best setting is kept per family,
and over all train scenarios for families that have no train part. Held-out scenarios are never read.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from dynamix.lab.simulator.episode import code_digest
from dynamix.lab.simulator.scenario import Suite, scenario_root
from dynamix.schemas.messages.allocation import ExchangePermission

from .rows import Choice, Row, Tuned, read_rows
from .runs import Ledger, OnProgress, fill, plan
from .verdict import OutcomeTable

DECIMALS = 3
"""Decimals of scores in the file."""
FIRST_SEED = 10_000
"""First seed of tuning; seeds of evaluation count from 0."""


def settings_of(exchange: ExchangePermission | None = None) -> tuple[Row, ...]:
    """The settings of all baselines; with `exchange` of those that decide the communication."""
    return read_rows(scenario_root() / "rows" / ("tune-exchange.toml" if exchange else "tune.toml"))


def tune(
    suite: Suite,
    rows: Sequence[Row],
    ledger: Ledger,
    *,
    seeds: Sequence[int],
    exchange: ExchangePermission | None = None,
    command: str = "",
    jobs: int = 1,
    data: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Tuned:
    """Run all settings on the scenarios of a suite and choose the best of each baseline.

    `exchange` is what all jobs permit.

    Raises:
        ValueError: when jobs do not permit what a setting needs.
        EpisodeError: when an episode raises.
    """
    settings: dict[str, list[Row]] = {}
    for row in rows:
        settings.setdefault(row.baseline, []).append(row if exchange is None else row.permitted(exchange))
    cells = plan(suite, [row for own in settings.values() for row in own], seeds, Tuned())
    fill(cells, ledger, jobs=jobs, data=data, on_progress=on_progress)
    table = OutcomeTable(suite.scenarios, cells, ledger)

    def choice(own: Sequence[Row], families: Sequence[str]) -> Choice:
        """The best setting; the first of equally good ones."""
        scores = {
            row.label: geometric_mean(  # families count alike
                geometric_mean(table.times(row.label, [family]).ravel()) for family in families
            )
            for row in own
        }
        best = min(own, key=lambda row: scores[row.label])
        return Choice(
            setting=best.label,
            options=best.options,
            initial_local_batch_size=best.local_batch_size,
            score_s=round(scores[best.label], DECIMALS),
            scores_s={label: round(score, DECIMALS) for label, score in scores.items()},
            misses={row.label: table.num_misses(row.label, families) for row in own},
        )

    def choices(families: Sequence[str]) -> dict[str, Choice]:
        return {baseline: choice(own, families) for baseline, own in settings.items()}

    return Tuned(
        command=command,
        scenarios=suite.digest,
        code=code_digest(),
        seeds=list(seeds),
        num_settings=max(map(len, settings.values())),
        families={family: choices([family]) for family in suite.families},
        overall=choices(list(suite.families)),
    )
