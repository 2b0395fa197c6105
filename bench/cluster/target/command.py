"""Train to a held-out accuracy on real clocks: `python -m bench.cluster --target 0.85 [--case NAME] [--arm ROW]`. Root.

Real gloo ranks on hosts made of network namespaces, with shares of the processor and slow links (bench.hosts). Training
times are compared; the clock stands still while the accuracy is looked up. Baselines are searched for their best
setting first; arms then run in turn under paired seeds. Each run is kept in --work, with a capture of it, so that an
interrupted comparison goes on where it was. At the end virtual clusters, calibrated on a run of `random`, predict the
ratios. Needs Linux, iproute2 and Fashion-MNIST (`make data`); nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from bench.harness.command import BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.figure import draw
from bench.hosts import Hosts, HostsError
from bench.results.result import markdown, write

from dynamix.cli.output import output_directory
from dynamix.cli.progress import ProgressLine
from dynamix.lab.calibration import NotEnoughWindowsError
from dynamix.lab.experiments.comparison.evaluation import ComparisonProgress
from dynamix.lab.workloads.datasets import MissingDataError

from .arms import RECORDED, ROWS, TargetArm
from .campaign import CaseOutcomes, compare, num_runs
from .cases import CASES, TargetCase
from .outcomes import Outcomes, TargetOutcome, TargetPoint, TargetRun, is_behind
from .prediction import NUM_SEEDS, CalibratedCase, Predicted, calibrated, predict
from .runner import TargetRunner, target_runner
from .verdict import HARM, NAME, SHORT, result_of, targets_of

ROOT = Path(__file__).parents[3]
DEFAULT_TARGET = 0.85
PROGRESS_EVERY_S = 10.0
NEVER_REACHED = 1.0
GRID_S = 1.0


class TargetForecast:
    """How much is left of a campaign, by the runs so far."""

    def __init__(self, num_total: int) -> None:
        self.num_total = num_total
        self.num_done = 0
        self._walls_s: list[float] = []

    def count_run(self, wall_s: float | None) -> None:
        """Count a run, with the time that it took; `None` for one that was known."""
        self.num_done += 1
        if wall_s is not None:
            self._walls_s.append(wall_s)

    def __str__(self) -> str:
        left = max(0, self.num_total - self.num_done)
        if not self._walls_s:
            return f"run {self.num_done + 1} of {self.num_total}"
        minutes = left * sum(self._walls_s) / len(self._walls_s) / 60
        return f"run {self.num_done + 1} of {self.num_total}, some {minutes:.0f} min left"


class RunKeeper:
    """Runs what is not known yet, and keeps it.

    Attributes:
        forecast: of what is left.
    """

    def __init__(self, runner: TargetRunner, outcomes: Outcomes, options: argparse.Namespace, num_total: int) -> None:
        self.forecast = TargetForecast(num_total)
        self._runner = runner
        self._outcomes = outcomes
        self._options = options
        self._progress = ProgressLine(PROGRESS_EVERY_S)
        self._counted: set[str] = set()
        """Keys: a search and a row can ask for the same run."""

    def run_of(self, case: TargetCase, arm: TargetArm, seed: int) -> TargetRun:
        """What determines a run; the recorded one goes on whatever its accuracy is."""
        target = NEVER_REACHED if arm == RECORDED else self._options.target
        return TargetRun(case=case, arm=arm, seed=seed, target_accuracy=target, grid_s=self._options.grid)

    def capture_of(self, case: TargetCase, arm: TargetArm, seed: int) -> Path:
        """Where the capture of a run is."""
        return self._outcomes.capture_of(self.run_of(case, arm, seed))

    async def __call__(
        self, case: TargetCase, arm: TargetArm, seed: int, limit_s: float, best_so_far: Sequence[TargetPoint] = ()
    ) -> TargetOutcome:
        """Run it, or find it among those that are kept; given up when it falls behind the best run so far."""
        run = self.run_of(case, arm, seed)
        known = self._outcomes.get(run)
        if known is not None and (known.answers(limit_s) or is_behind(known.points, best_so_far)):
            self._count(run, None)
            return known
        began_s = time.monotonic()
        outcome = await self._runner.run(run, limit_s, self._outcomes.capture_of(run), self._watch, best_so_far)
        self._outcomes.keep(run, outcome)
        self._count(run, time.monotonic() - began_s)
        reached = outcome.time_to_target_s
        said = f"not at the target after {outcome.limit_s:.1f} s" if reached is None else f"{reached:.1f} s"
        self._progress.write_line(f"  {run.label}: {said} ({outcome.wall_s:.0f} s in all)")
        return outcome

    def _count(self, run: TargetRun, wall_s: float | None) -> None:
        if run.key not in self._counted:
            self._counted.add(run.key)
            self.forecast.count_run(wall_s)

    def _watch(self, run: TargetRun, point: TargetPoint) -> None:
        sizes = "/".join(map(str, point.local_batch_sizes))
        self._progress.show(
            f"  {run.label}: {point.trained_s:.1f} s, {point.accuracy:.1%}, sizes {sizes}; {self.forecast}"
        )


async def _run_all(
    hosts: Hosts, cases: Sequence[TargetCase], rows: Collection[str], options: argparse.Namespace
) -> tuple[list[CaseOutcomes], dict[str, Path]]:
    """All runs on real clocks, and the recorded run of each case."""
    seeds, outcomes, recorded = _seeds(options), Outcomes(options.work / "runs"), not options.no_prediction
    logs = options.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with target_runner(hosts, logs, options.data) as runner:
        num_total = len(cases) * num_runs(rows, len(seeds), recorded=recorded)
        keeper = RunKeeper(runner, outcomes, options, num_total)
        found = [await compare(case, rows, seeds, keeper, recorded=recorded) for case in cases]
        return found, {case.name: keeper.capture_of(case, RECORDED, seeds[0]) for case in cases}


def _predict(
    found: Sequence[CaseOutcomes], captures: Mapping[str, Path], options: argparse.Namespace
) -> dict[str, Predicted]:
    """What virtual clusters say of the cases; a case that cannot be calibrated says why."""
    cases: list[CalibratedCase] = []
    refused: dict[str, Predicted] = {}
    for case in found:
        name = case.case.name
        try:
            cases.append(calibrated(case.case, captures[name], options.target, options.grid))
        except NotEnoughWindowsError as error:
            refused[name] = Predicted(reason=str(error))

    def show(progress: ComparisonProgress) -> None:
        left = "" if progress.left_s is None else f", some {progress.left_s / 60:.0f} min left"
        line.show(f"  predicting: {progress.num_done} of {progress.num_total}, {progress.newest}{left}")

    with ProgressLine(PROGRESS_EVERY_S) as line:
        arms = {case.case.name: case.arms for case in found}
        data = None if options.data is None else Path(options.data)
        return refused | predict(cases, arms, options.work, show, num_seeds=options.virtual_seeds, data=data)


def _command(options: argparse.Namespace) -> str:
    """What measures the same again."""
    grid = f" --grid {options.grid:g}" if options.grid != GRID_S else ""
    chosen = "".join(f" --case {name}" for name in options.case or ())
    chosen += "".join(f" --arm {row}" for row in options.arm or ())
    chosen += f" --virtual-seeds {options.virtual_seeds}" if options.virtual_seeds != NUM_SEEDS else ""
    return f"python -m bench.cluster --target {options.target:g}{grid} --seeds {options.seeds}{chosen}"


def _seeds(options: argparse.Namespace) -> list[int]:
    return list(range(1, 1 + options.seeds))


def measure(options: argparse.Namespace) -> BenchmarkReport:
    """Run, predict and judge.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        BenchmarkError: when a service or a rank fails.
    """
    chosen = [CASES[name] for name in options.case or CASES]
    cases = [msgspec.structs.replace(case, time_limit_s=options.limit or case.time_limit_s) for case in chosen]
    rows = options.arm or ROWS
    with Hosts(cases[0].num_hosts) as hosts, hosts.entered():
        found, captures = asyncio.run(_run_all(hosts, cases, rows, options))
    predicted = {} if options.no_prediction else _predict(found, captures, options)
    result = result_of(
        found,
        predicted,
        target_accuracy=options.target,
        grid_s=options.grid,
        seeds=_seeds(options),
        name=options.name,
        command=_command(options),
    )
    if options.output is not None:
        write(result, options.output)
    return BenchmarkReport(
        {"result": result},
        markdown(result),
        targets=targets_of(found, predicted),
        draw=lambda path: draw([[panel] for panel in result.panels], path),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 when a target is missed."""
    parser = benchmark_parser(
        *("cluster", __doc__),
        ("--target", DEFAULT_TARGET, "held-out accuracy, 0 ... 1"),
        ("--grid", GRID_S, "seconds of training time between two looks at the accuracy"),
        ("--seeds", 3, "number of seeds of model and data"),
        ("--virtual-seeds", NUM_SEEDS, "those of the virtual runs that predict"),
        ("--limit", 0.0, "seconds of training time after which a run has missed the target; 0: the case's own"),
        has_figure=True,
    )
    parser.add_argument("--case", action="append", choices=CASES, help="only this; may be given again")
    parser.add_argument(
        "--arm", action="append", choices=ROWS, help="only this, and what it starts from; may be given again"
    )
    parser.add_argument(
        "--no-prediction", action="store_true", help="leave the virtual clusters out, and the run that they need"
    )
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    parser.add_argument(
        "--work", type=output_directory, default=ROOT / "out" / "cluster", help="keeps runs (default: out/cluster)"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=output_directory,
        help="write results/NAME.json, .png and the table there: docs",
    )
    parser.add_argument("--name", choices=(NAME, SHORT, HARM), default=NAME, help="of that (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not (0 < options.target < 1 and 0 < options.grid < math.inf and 0 <= options.limit < math.inf):
        parser.error("--target is between 0 and 1, --grid above 0, --limit not below 0, both finite")
    if min(options.seeds, options.virtual_seeds) < 1:
        parser.error("--seeds and --virtual-seeds are at least 1")
    return run_benchmark("cluster", options, lambda: measure(options), cannot=(HostsError, MissingDataError))
