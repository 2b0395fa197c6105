"""The held-out comparison of exchanges as tables of docs/results.md: `python -m bench.results.exchange`.

Reads docs/results/exchange-heldout.json, which `dynamix evaluate --exchange local --against ...` wrote, and puts its
rows between their markers: the time of each row over that of the rule whose gradients are exact, and over those of
static rows with local steps and int8; and whether the default policy is as fast as it was meant to be.
"""

from collections.abc import Iterator, Sequence

from bench.harness.tables import markdown

from dynamix.lab.experiments.comparison.scores import RatioInterval
from dynamix.lab.experiments.comparison.verdict import Verdict, VerdictRow

from .verdict_table import VerdictTable, interval_text

LIMITS = {"slow-links": 0.60, "congestion": 0.60}
"""Most time over that of exact gradients, by family: where links are slow or congested."""
LIMIT = 1.02
"""Elsewhere."""
STATIC_LIMITS = {"slow-links": 0.90}
"""Most time over that of a static row, where links differ; elsewhere no interval may be above 1 as a whole."""


def _parts(verdict: Verdict) -> list[str]:
    """What was meant, then every row against each base in every family."""
    exact, *statics = verdict.against
    seeds = f"seeds {min(verdict.seeds)} to {max(verdict.seeds)}"
    columns = [f"over `{base}`" for base in (exact, *statics)]
    intro = (
        f"Time to target of `{verdict.default_policy}` in jobs that permit local steps, {seeds}; below 1 is faster. "
        "Brackets: 95 % interval over seeds."
    )
    return [
        intro,
        markdown(["family", *columns, "as meant"], list(_judged(verdict, exact, statics))),
        *(part for base in verdict.against for part in _against(verdict, base)),
    ]


def misses(family: str, exact: RatioInterval | None, statics: Sequence[RatioInterval | None]) -> list[str]:
    """Return in what the default policy is slower in a family than meant; nothing where all is as meant."""
    if exact is None or None in statics:
        return ["not measured"]
    found = []
    limit = LIMITS.get(family, LIMIT)
    if exact.ratio > limit:
        found.append(f"above {limit:.2f} of exact gradients")
    for static in statics:
        assert static is not None, "looked at above"
        if static.low is not None and static.low > 1:
            found.append("slower than static")
        elif static.ratio > STATIC_LIMITS.get(family, float("inf")):
            found.append(f"above {STATIC_LIMITS[family]:.2f} of static")
    return list(dict.fromkeys(found))


def _judged(verdict: Verdict, exact: str, statics: Sequence[str]) -> Iterator[list[str]]:
    for name, family in verdict.families.items():
        row = _row(family.policies, verdict.default_policy)
        ratios = [row.against.get(base) for base in (exact, *statics)]
        missed = misses(name, ratios[0], ratios[1:])
        title = f"{name} (control)" if family.control else name
        yield [title, *map(interval_text, ratios), ", ".join(missed) or "yes"]


def _against(verdict: Verdict, base: str) -> Iterator[str]:
    yield f"Time to target over that of `{base}`:"
    rows = [
        [
            f"`{row.policy}`",
            *(
                interval_text(_row(family.policies, row.policy).against.get(base))
                for family in verdict.families.values()
            ),
        ]
        for row in verdict.policies
    ]
    yield markdown(["policy", *verdict.families], rows)


def _row(rows: Sequence[VerdictRow], policy: str) -> VerdictRow:
    return next(row for row in rows if row.policy == policy)


TABLE = VerdictTable("exchange-heldout", _parts)


if __name__ == "__main__":
    TABLE.write()
