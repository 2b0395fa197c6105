"""The tuned settings of the baselines as a table."""

from dynamix.cli.tables import console_for, new_table
from dynamix.lab.comparison.rows import Choice, Tuned


def show(tuned: Tuned, *, stderr: bool) -> None:
    """Print what was chosen for every baseline in every family, with its score."""
    baselines = list(tuned.overall)
    headings = ("family", *baselines)
    table = new_table(*headings, left=headings, title=f"Best of {tuned.num_settings} settings each")
    for family, choices in [*tuned.families.items(), ("all", tuned.overall)]:
        table.add_row(family, *(_choice(baseline, choices[baseline]) for baseline in baselines))
    console_for(stderr=stderr).print(table)


def _choice(baseline: str, choice: Choice) -> str:
    return f"{choice.setting.removeprefix(baseline).lstrip(':@')}: {choice.score_s:.1f} s"
