"""What docs/results.md shows of a comparison whose verdict `dynamix evaluate` wrote to docs/results/NAME.json."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamix.lab.experiments.comparison.scores import RatioInterval
from dynamix.lab.experiments.comparison.verdict import Verdict

from .result import NOT_RUN, write_table

DOCS = Path(__file__).parents[2] / "docs"


class VerdictTable(NamedTuple):
    """The tables of one verdict, between the markers of its name."""

    name: str
    make_parts: Callable[[Verdict], list[str]]
    """The paragraphs and tables above the command, its cost and the picture, which all have."""

    def text(self, verdict: Verdict) -> str:
        """What stands between the markers."""
        cost = f" ({verdict.core_minutes:.0f} minutes of a core)" if verdict.core_minutes else ""
        picture = f"![{self.name}](results/{self.name}.png)"
        return "\n\n".join([*self.make_parts(verdict), f"`{verdict.command}`{cost}", picture])

    def expected(self, docs: Path = DOCS) -> str:
        """What docs/results.md must hold between the markers."""
        path = docs / "results" / f"{self.name}.json"
        return self.text(msgspec.json.decode(path.read_bytes(), type=Verdict)) if path.exists() else NOT_RUN

    def write(self, docs: Path = DOCS) -> None:
        """Write the tables into docs/results.md."""
        write_table(docs / "results.md", self.name, self.expected(docs))


def interval_text(interval: RatioInterval | None) -> str:
    """A ratio with its intervals, as tables have it."""
    if interval is None:
        return "-"
    spread = "" if interval.low is None or interval.high is None else f" [{interval.low:.2f}, {interval.high:.2f}]"
    if interval.family_low is not None:
        spread += f" {{{interval.family_low:.2f}, {interval.family_high:.2f}}}"
    return f"{interval.ratio:.2f}{spread}"
