"""How agents learned, as a figure: `python -m bench.stigmergy.curve docs/results/agents.json --png docs/stigmergy.png`.

Reads what `dynamix learn --policy stigmergy --json FILE` wrote. Shown are, over episodes and by stage of the
curriculum, the time to the target over that of `rule` with drawn choices, that of the likeliest choices in the last
stage, and what the agents are still undecided about.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from bench.harness.figure import Curve, Panel, draw

from dynamix.cli.output import output_path
from dynamix.runtime.output_files import PNG

Row = dict[str, Any]
"""One update, as `dynamix.lab.experiments.learning.LearningUpdate` is written."""


def stages_of(scenarios: Sequence[str]) -> list[int]:
    """Numbers of workers, in the order of the stages, from names such as `mixed-8-of-32`."""
    return list(dict.fromkeys(int(name.rpartition("-of-")[2]) for name in scenarios))


def panels_of(document: dict[str, Any]) -> list[Panel]:
    """The curves of one learning run."""
    rows: list[Row] = document["updates"]
    stages = stages_of(document["metadata"]["scenarios"])
    validated = [(row["num_episodes"], row["validation_vs_rule"]) for row in rows if row["validation_vs_rule"]]
    times = [*_curves(rows, stages, lambda row: row["vs_rule"])]
    times.append(Curve(label=f"{stages[-1]} workers, likeliest", points=validated, style="ko-"))
    undecided = [*_curves(rows, stages, lambda row: row["entropy"])]
    return [
        Panel(title="Time to the target over that of rule", x="episode", y="ratio", curves=times, limit=1.0),
        Panel(title="Entropy of the choices", x="episode", y="nats", curves=undecided),
    ]


def _curves(rows: Sequence[Row], stages: Sequence[int], value: Callable[[Row], float]) -> list[Curve]:
    """A curve for each stage, as `LearningPlan.scenario_of` divides the updates."""
    points: dict[int, list[tuple[float, float]]] = {number: [] for number in stages}
    for index, row in enumerate(rows):
        points[stages[index * len(stages) // len(rows)]].append((row["num_episodes"], value(row)))
    return [Curve(label=f"{number} workers, drawn", points=found, style="-") for number, found in points.items()]


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.stigmergy.curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="what `dynamix learn --policy stigmergy --json FILE` wrote")
    parser.add_argument("--png", type=output_path(PNG), required=True, metavar="FILE", help="draw the figure here")
    options = parser.parse_args()
    document = msgspec.json.decode(options.file.read_bytes())
    draw([panels_of(document)], Path(options.png))
    return 0


if __name__ == "__main__":
    sys.exit(main())
