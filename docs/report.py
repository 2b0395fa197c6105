"""Write the figures and tables of docs/report.md, and README's summary, from docs/results/*.csv: `make report`.

Text is written by hand; what stands between `<!-- NAME -->` and `<!-- end -->` is a block of `blocks`. Figures are
docs/results/report-NAME.svg. A table that is missing or has few rows makes a shorter block.
"""

import csv
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from bench.harness import Interval, Table, mean_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
PAGES = (ROOT / "README.md", ROOT / "docs/report.md")
UNEVEN = ("unequal-processors", "slow-link", "slow-links", "slow-down")
TITLES = {
    "unequal-processors": "one slow processor", "slow-link": "one slow link", "slow-links": "slow links",
    "slow-down": "later slow-down", "equal": "nothing slow", "heterogeneous": "all uneven",
    "homogeneous (control)": "all equal", "best-static+track": "best static, divided", "adam-links-6": "Adam",
    "wide-area-8": "10 ms latency", "rate-8": "lower learning rate", "campus-5": "one slow link", "conv-5": "CNN",
    "office-6": "100 Mbit/s", "backup-hours-8": "congestion", "tenants-slow-8": "tenants, slow links",
    "8": "8 workers", "16": "16 workers", "32": "32 workers", "64": "64 workers", "128": "128 workers",
    "n32": "32 workers", "n128": "128 workers", "model": "other model", "unseen-mix": "unseen mix",
    "tenants-10": "tenants", "calm-10": "calm", "paper-workers": "transformer",
    "rule:exchange=exact": "over rule with exact gradients",
    "static:track=1,every=4,codec=int8:exchange=local size 64": "over 4 local steps, int8, 64 samples",
}  # fmt: skip
COLORS = {
    "static|best|proportional|oracle": "0.35",
    "goodput|noise|doubling|omnilearn|random|ppo-paper|torch|accelerate|hivemind|adaptdl": "#c8641b",
}
# grey for static sizes and bounds, orange for what others published; ours are blue
SUMMARY = """Where one of four hosts or their links are slow, `rule` reaches 85 % held-out accuracy in {} of plain DDP's
time, and in {} if gradients may be rounded and averaged less often. Where nothing is slow, nothing is gained: {} with
the default `split`, {} with `rule`."""
Panels = dict[str, dict[str, Interval | None]]


# --- tables of record ------------------------------------------------------------------------------------------------


class Results:
    """Tables of docs/results, one below the other; without rows where there are none yet."""

    def __init__(self, *names: str) -> None:
        self.rows: list[dict[str, str]] = []
        for path in (RESULTS / f"{name}.csv" for name in names):
            if path.exists():
                self.rows += csv.DictReader(path.read_text().splitlines())

    def names(self, column: str) -> list[str]:
        """What stands in a column, each once."""
        return list(dict.fromkeys(row[column] for row in self.rows))

    def at(self, *place: str) -> Interval | None:
        """The figure in the row whose first cells are these, in the column that comes last."""
        *keys, column = place
        for row in self.rows:
            if [*row.values()][: len(keys)] == keys and row.get(column):
                ends = (row.get(f"{column} {end}", row.get(end)) for end in ("low", "high"))
                return Interval(float(row[column]), *(float(end) if end else None for end in ends))
        return None


class Clocks(Results):
    """Tables of bench.cluster."""

    def over(self, case: str, arm: str, base: str = "plain") -> Interval | None:
        """Geometric mean of an arm's times over a base's, in pairs of one seed; a missed run counts as its limit."""
        logs: list[float] = []
        for part in (case, f"{case}-again"):
            rows = {row["arm"]: row["time to target, s"] for row in self.rows if row["case"] == part}
            if arm in rows and base in rows:
                times = ([float(time.strip(" >")) for time in rows[one].split("/")] for one in (arm, base))
                logs += [math.log(ours / theirs) for ours, theirs in zip(*times, strict=False)]
        mean = mean_of(logs) if logs else None
        return mean and Interval(math.exp(mean.value), *(end and math.exp(end) for end in mean[1:]))


CLOCKS, CALM, OTHERS = Clocks("cluster", "cluster-short"), Clocks("cluster-equal"), Results("others")
HELDOUT, LINKS, WORKERS = Results("heldout"), Results("links-heldout"), Results("workers")
PAPER = ("static", *sorted(path.stem for path in RESULTS.glob("paper-*.csv")))


def clock(case: str, arm: str, base: str = "plain") -> Interval | None:
    """A ratio on real clocks; with nothing slow, of the newer runs where they have both arms."""
    return (CALM.over(case, arm, base) if case == "equal" else None) or CLOCKS.over(case, arm, base)


def paper(columns: str, base: str = "") -> Panels:
    """The last of some columns that `base` has a figure in, by policy and over it, each part of a table by itself."""
    found: Panels = {}
    for name in PAPER:
        table = Results(name)
        for row in (row for row in table.rows if "policy" in row):
            part, policy = [*row.values()][: [*row].index("policy")], row["policy"]
            bases = {each: table.at(*part, base or policy, each) for each in row if re.fullmatch(columns, each)}
            column, over = next(((each, one) for each, one in [*bases.items()][::-1] if one), ("", None))
            if over:
                job = TITLES.get(name, name.removeprefix("paper-").replace("static", "small CNN"))
                title = ", ".join([job, *(TITLES.get(cell, cell) for cell in part)])
                own, title = table.at(*part, policy, column), title + "".join(re.findall(r" to \d+%", column))
                if own and base:
                    own = Interval(own.value / over.value, None, None)
                found.setdefault(title, {})[policy] = own
    return found


def written(figure: Interval | None) -> str:
    """Two digits behind the point, and the interval where there is one."""
    if figure is None or None in figure:
        return "-" if figure is None else f"{figure.value:.2f}"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*figure)


# --- figures ---------------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """Panels of ratios with their intervals, one row per label, and what a reader needs to repeat them."""

    says: str
    command: str
    tables: Sequence[str]
    x: str
    panels: Panels

    @property
    def digest(self) -> str:
        """Hash of the drawing; the file has it, too."""
        return hashlib.sha256(repr((self.x, self.panels)).encode()).hexdigest()[:16]

    def draw(self, path: Path) -> None:
        """Write an SVG."""
        import matplotlib as mpl  # noqa: PLC0415 - the test of the page does without
        from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

        mpl.rcParams.update({"svg.hashsalt": "report", "font.size": 7.5, "axes.linewidth": 0.6})
        labels = list(dict.fromkeys(label for panel in self.panels.values() for label in panel))
        ends = [1.0, *(end for panel in self.panels.values() for one in panel.values() if one for end in one if end)]
        num_rows, ticks = -(-len(self.panels) // 5), [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
        canvas = Canvas(figsize=(6.6, num_rows * (0.5 + 0.17 * len(labels)) + 0.25), layout="constrained")
        shape = num_rows, -(-len(self.panels) // num_rows)
        grid = [*canvas.subplots(*shape, sharex=True, sharey=True, squeeze=False).flat]
        for axes, (title, panel) in zip(grid, self.panels.items(), strict=False):
            axes.axvline(1.0, color="0.6", linewidth=0.8, zorder=0)
            for at, (label, figure) in enumerate((label, panel.get(label)) for label in labels):
                if figure:
                    color = next((color for start, color in COLORS.items() if re.match(start, label)), "#1f4fa3")
                    axes.plot([end or figure.value for end in figure[1:]], [at, at], color=color, linewidth=1.4)
                    axes.plot(figure.value, at, "o", color=color, markersize=3.2)
                    place = {"transform": axes.get_yaxis_transform(), "verticalalignment": "center", "fontsize": 6.5}
                    axes.text(1.02, at, f"{figure.value:.2f}", color=color, **place)
            axes.set_title(fill(title, 21), fontsize=7.5, loc="left")
            axes.set(xscale="log", ylim=(len(labels) - 0.4, -0.6), yticks=range(len(labels)), yticklabels=labels)
            axes.set_xticks([], minor=True)
            axes.set(xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks], xlim=(0.9 * min(ends), 1.1 * max(ends)))
            axes.grid(axis="x", alpha=0.3, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in grid[len(self.panels) :]:
            axes.remove()
        canvas.supxlabel(self.x, fontsize=7.5)
        canvas.savefig(path, metadata={"Date": None, "Description": self.digest})


def panels(names: Iterable[str], labels: Iterable[str], at: Callable[[str, str], Interval | None]) -> Panels:
    """A figure for each label in each panel."""
    return {TITLES.get(name, name): {TITLES.get(label, label): at(name, label) for label in labels} for name in names}


def figures() -> dict[str, Figure]:
    """All whose tables are there, in the order of the page."""
    arms = ("static", "proportional", "goodput", "split", "rule", "static-local", "rule-local")
    policies = ("best-static+track", "omnilearn", "doubling", "noise-scale", "goodput", "rule", "oracle")
    over, virtual, local = "time to the target over that of", "python -m bench.virtual --only", "rule:exchange=local"
    lines = [f"{row['arm']} ({row['changed lines']})" for row in OTHERS.rows if row["arm"] != "plain"]
    found = {
        "clocks": Figure(
            *("Real clocks, six seeds; nothing slow: `split` 32 pairs, `rule` 16", "make cluster"),
            *(("cluster", "cluster-short", "cluster-equal"), f"{over} plain DDP"),
            panels((*UNEVEN, "equal"), arms, clock),
        ),
        "others": Figure(
            *("Other people's programs; in brackets the lines to change", "make others", ("others",)),
            f"{over} plain DDP",
            panels(OTHERS.names("case"), lines, lambda case, arm: OTHERS.at(case, arm.split()[0], "vs plain")),
        ),
        "heldout": Figure(
            *("Held-out virtual clusters, six seeds", f"{virtual} heldout", ("heldout",)),
            f"{over} the best static size, divided equally",
            panels(HELDOUT.names("families"), policies, lambda *at: HELDOUT.at(*at, "over best-static")),
        ),
        "links": Figure(
            *("Local steps on held-out virtual clusters, four seeds", f"{virtual} links-heldout", ("links-heldout",)),
            "time of rule with local steps to the target",
            panels([*TITLES][-2:], LINKS.names("family"), lambda *at: LINKS.at(local, *at, "time ratio")),
        ),
        "workers": Figure(
            *("More workers, six seeds", f"{virtual} workers", ("workers",), f"{over} static 64"),
            panels(WORKERS.names("workers"), ("rule", "goodput"), lambda *at: WORKERS.at(*at, "time vs static@64")),
        ),
        "paper": Figure(
            "The paper's experiments; one seed, the small CNN six",
            f"{virtual} static` and `{virtual} NAME --seeds 1",
            *(PAPER, f"{over} static 32"),
            paper(r"s to \d+%|median time to target, s", "static@32"),
        ),
    }
    return {name: figure for name, figure in found.items() if figure.panels}


def table(corner: str, rows: Panels, form: Callable[[Interval | None], str] = written) -> str:
    """Figures as a table of a page."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    cells = [[name, *(form(row.get(column)) for column in columns)] for name, row in rows.items()]
    return Table("", [corner, *columns], cells).markdown()


def blocks() -> dict[str, str]:
    """What stands between the marks of the pages, by name."""
    found = {"others": "There is no table of other people's programs yet: `make others` writes it."}
    for number, (name, figure) in enumerate(figures().items(), 2):
        files = ", ".join(f"[{table}](results/{table}.csv)" for table in figure.tables)
        words = fill(f"**Figure {number}.** {figure.says}. `{figure.command}`: {files}", 120, break_on_hyphens=False)
        found[name] = f"![Figure {number}](results/report-{name}.svg)\n\n{words}"
    for case in OTHERS.names("case"):
        arms = sorted((one.value, arm) for arm in OTHERS.names("arm") if (one := OTHERS.at(case, arm, "vs plain")))
        ours = next((arm for _, arm in arms if arm.startswith(("rule", "split"))), "plain")
        theirs = next((arm for _, arm in arms if arm not in CLOCKS.names("arm")), "plain")
        found["others"] += f"\n\n- {TITLES.get(case, case)}: `{theirs}`, the fastest of theirs, over our `{ours}`: "
        found["others"] += written(OTHERS.at(case, theirs, f"vs {ours}"))
    bases = (("rule", "static"), ("rule", "goodput"), ("rule-local", "rule"))
    pairs = {f"`{arm}` over `{base}`": (arm, base) for arm, base in bases}
    found["bases"] = table("time", panels(pairs, UNEVEN, lambda row, case: clock(case, *pairs[row])))
    found["accuracies"] = table("accuracy", paper("test accuracy"), lambda one: f"{one.value:.1%}" if one else "-")
    reached = [sorted(one.value for case in UNEVEN if (one := clock(case, arm))) for arm in ("rule", "rule-local")]
    spans = (f"{least:.2f} to {most:.2f}" for least, *_, most in reached)
    found["summary"] = fill(SUMMARY.format(*spans, *(written(clock("equal", arm)) for arm in ("split", "rule"))), 120)
    return found


def page(path: Path) -> str:
    """What a page should be."""
    made, block = blocks(), re.compile(r"<!-- (\w+) -->.*?<!-- end -->", re.DOTALL)
    return block.sub(lambda found: f"<!-- {found[1]} -->\n\n{made[found[1]]}\n\n<!-- end -->", path.read_text())


if __name__ == "__main__":
    for key, drawn in figures().items():
        drawn.draw(RESULTS / f"report-{key}.svg")
    for file in PAGES:
        file.write_text(page(file))
