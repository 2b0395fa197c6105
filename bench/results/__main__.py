"""Run the experiments: `python -m bench.results [--only NAME ...] [--scale reduced|full] [--jobs N]`.

Each writes docs/results/NAME.json and NAME.png, and its table into docs/results.md. Runs and learned policies are kept
in out/results: a second start goes on where the first one was killed. `reduced` takes a few minutes each on a core,
`full` is for many cores and a long night; `smoke` only shows that everything runs, and belongs into another --output.
The experiment `adaptdl` needs other packages: `make adaptdl` installs them and runs it, and only --only names it here.
The full models of `paper-...` take hours at any scale: `make paper` runs them, and only --only names them here.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dynamix.cli.output import output_directory
from dynamix.lab.workloads.datasets import MissingDataError

from .adaptdl import PackageMissingError, published_goodput
from .baselines import cluster_sizes, static_sizes, topologies
from .laboratory import SCALES, Laboratory
from .learned import cost, other_models, other_optimizer, reward_curve
from .levers import learned_levers
from .paper import resnet20, transformer, vgg11
from .result import MADE_BY, ExperimentResult, write
from .rewards import published_reward, sensitivity

ROOT = Path(__file__).parents[2]

EXPERIMENTS: dict[str, Callable[[Laboratory], ExperimentResult]] = {
    "static": static_sizes,
    "learning": reward_curve,
    "adam": other_optimizer,
    "workers": cluster_sizes,
    "transfer": other_models,
    "sensitivity": sensitivity,
    "topology": topologies,
    "reward": published_reward,
    "cost": cost,
    "levers": learned_levers,
    "adaptdl": published_goodput,
    "paper-vgg11": vgg11,
    "paper-resnet20": resnet20,
    "paper-transformer": transformer,
}


def _last_cost(docs: Path, name: str, laboratory: Laboratory) -> str:
    """What an experiment took when its committed result was made at this scale, if that was noted."""
    path = docs / "results" / f"{name}.json"
    if not path.exists():
        return ""
    found = msgspec.json.decode(path.read_bytes(), type=ExperimentResult)
    if found.core_minutes is None or found.scale != laboratory.scale.name:
        return ""
    return f" ({found.core_minutes:.0f} minutes of a core when last run)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, help="an experiment; may be given again")
    parser.add_argument("--scale", choices=SCALES, default="reduced", help="(default: %(default)s)")
    parser.add_argument("--seeds", type=int, help="scenario seeds (default: as the scale has it)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="directory with the data sets (default: the usual places)")
    parser.add_argument("--output", type=output_directory, default=ROOT / "docs", help="(default: docs)")
    parser.add_argument(
        "--work", type=output_directory, default=ROOT / "out" / "results", help="(default: out/results)"
    )
    options = parser.parse_args(arguments)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    scale = SCALES[options.scale]
    scale = scale._replace(num_seeds=options.seeds or scale.num_seeds)
    laboratory = Laboratory(scale, options.work / options.scale, jobs=options.jobs, data=options.data)
    for name in options.only or [name for name in EXPERIMENTS if name not in MADE_BY]:
        began_s = time.monotonic()
        print(f"{name}: {EXPERIMENTS[name].__doc__}{_last_cost(options.output, name, laboratory)}", flush=True)
        try:
            write(EXPERIMENTS[name](laboratory), options.output)
        except (MissingDataError, PackageMissingError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
