"""The held-out comparison as the tables of docs/results.md: `python -m bench.results.heldout`.

Reads docs/results/heldout.json, which `dynamix evaluate` wrote, and puts its rows between their markers.
"""

from bench.harness.tables import markdown

from dynamix.lab.experiments.comparison.contenders import BEST_STATIC
from dynamix.lab.experiments.comparison.verdict import Verdict, VerdictRow

from .verdict_table import VerdictTable, interval_text

OVERALL = ["policy", "median time to target, s", "missed", "vs best static", "vs goodput", "test accuracy", "runs"]


def _parts(verdict: Verdict) -> list[str]:
    """All rows over the heterogeneous families, and the ratio of each to best static in every family."""
    seeds = f"seeds {min(verdict.seeds)} to {max(verdict.seeds)}"
    intro = (
        f"Default policy: `{verdict.default_policy}`. Over the heterogeneous families "
        f"({', '.join(verdict.heterogeneous_families)}), {seeds}; brackets: 95 % interval; below 1 is faster."
    )
    headings = ["policy", *(f"{name} (control)" if one.control else name for name, one in verdict.families.items())]
    has_samples = any(row.accuracy_at_equal_samples is not None for row in verdict.policies)
    overall = [*OVERALL, *(["accuracy at equal samples"] if has_samples else [])]
    return [
        *_headline(verdict),
        intro,
        markdown(overall, [_overall(row)[: len(overall)] for row in verdict.policies]),
        "Per family, time to target over that of the best static size:",
        markdown(headings, [_per_family(verdict, row.policy) for row in verdict.policies]),
    ]


def _headline(verdict: Verdict) -> list[str]:
    """The default policy against each baseline; the control counts as a family in the first column."""
    if not verdict.headline:
        return []
    rows = [
        [f"`{row.against}`", *map(interval_text, (row.all_families, row.heterogeneous, row.control))]
        for row in verdict.headline
    ]
    intro = (
        f"Time to target of `{verdict.default_policy}` over that of each baseline; below 1 is faster. Brackets: 95 % "
        "interval over seeds, for these families; braces: with the families as a sample of those there could be."
    )
    return [
        intro,
        markdown(["against", "all families", "heterogeneous families", "control"], rows),
    ]


def _overall(row: VerdictRow) -> list[str]:
    accuracy = "-" if row.test_accuracy is None else f"{row.test_accuracy:.3f}"
    median = "-" if row.median_time_to_target_s is None else f"{row.median_time_to_target_s:.1f}"
    ratios = [interval_text(row.vs_best_static), interval_text(row.vs_goodput)]
    at_equal = "-" if row.accuracy_at_equal_samples is None else f"{row.accuracy_at_equal_samples:.3f}"
    return [f"`{row.policy}`", median, str(row.misses), *ratios, accuracy, str(row.num_runs), at_equal]


def _per_family(verdict: Verdict, policy: str) -> list[str]:
    """A row's ratio in each family; for best static, whose ratio is 1, the local batch size that was chosen."""
    if policy == BEST_STATIC:
        sizes = (family.best_static_local_batch_size for family in verdict.families.values())
        return [f"`{policy}`", *("-" if size is None else f"1 (size {size})" for size in sizes)]
    ratios = (
        interval_text(row.vs_best_static)
        for family in verdict.families.values()
        for row in family.policies
        if row.policy == policy
    )
    return [f"`{policy}`", *ratios]


TABLE = VerdictTable("heldout", _parts)


if __name__ == "__main__":
    TABLE.write()
