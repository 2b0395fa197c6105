"""What steering costs a training: `python -m bench.overhead [--json FILE] [--pairs N]`, about three minutes.

One job of two gloo ranks on the CPU, with a real broker, k = 20 and steps paced to 50 ms by a sleep of FIXED length (a
sleep to a deadline would hide what we cost). Each window is answered by an action over the broker, which is adopted;
the learning rate is scaled on every step. Two figures from the same run, of rank 0, which does the most:

paired  blocks of steps with the session against blocks of the same model in plain DDP, without any communication hook,
        with torch's loader and sampler, in the same processes, in random order; no timers run. Judged is the CPU time
        of the training thread, with the session less without: all of ours is in it, DDP calling into Python too, and
        what plain DDP does is not. Beside it the wall clock, which has waiting for a core and for the other rank in it,
        and the CPU time of all threads.
direct  where it goes: time between entering and leaving our code on the training thread, by part, in blocks of their
        own after the pairs, in turn by the wall clock and in CPU time of the thread. The timers' own cost is in it:
        with caches that a step has emptied some 10 us a call, of a dozen. The launch of the all-reduce stands apart:
        plain DDP launches the same one, from C++. The wait for the all-reduce, in our hook, is left out: plain DDP
        waits there too. What the bus client's thread does is not on the training thread.

Not included: attaching, the services themselves, and the first two windows.
"""

import asyncio
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.harness.broker import broker_with_bus
from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark
from bench.harness.part_timer import CLOCKS
from bench.harness.rounds import difference
from bench.harness.tables import aligned, number
from bench.overhead.ranks import BLOCK_STEPS, LAUNCH, NUM_RANKS, OverheadPlan, RankTimings, run_rank
from bench.overhead.training import HIDDEN, LOCAL_BATCH_SIZE, WINDOW_STEPS, make_model

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode_any
from dynamix.schemas.messages import Action, Applied, Report
from dynamix.schemas.streams import FEED

PAIRED = (*CLOCKS, "thread")
"""Wall clock, CPU time of all threads, and of the training thread."""
TARGET_THREAD_PERCENT = 1.0
TARGET_PAIRED_PERCENT = 5.0


class Answerer:
    """Stands in for the services: answers each report with an action of the same sizes."""

    def __init__(self, bus: Bus, *, tracking: bool) -> None:
        self.num_reports = 0
        self.num_applied = 0
        self._bus = bus
        self._last = Action(
            job="none",
            generation=0,
            window=0,
            local_batch_sizes=(LOCAL_BATCH_SIZE,) * NUM_RANKS,
            deltas=(0,) * NUM_RANKS,
            policy="static",
            policy_version=0,
            watermark=0,
            split="tracking" if tracking else "fixed",
        )
        self._last_sequence = 0

    async def run(self) -> None:
        """Answer until cancelled."""
        wanted = [subjects.of("report", subjects.ANY, subjects.ANY), subjects.of("applied", subjects.ANY)]
        async with self._bus.consume(FEED.name, wanted, start="all") as consumer:
            async for batch in consumer:
                for message in batch:
                    match decode_any(message.subject, message.payload):
                        case Report() as report:
                            await self._answer(report, message.sequence)
                        case Applied():
                            self.num_applied += 1

    async def _answer(self, report: Report, sequence: int) -> None:
        self.num_reports += 1
        action = msgspec.structs.replace(self._last, job=report.job, window=report.window, watermark=sequence)
        self._last = seal(action, self._last.hash)
        self._last_sequence = await self._bus.publish_action(self._last, expected_last=self._last_sequence)


async def measure(plan: OverheadPlan) -> BenchmarkReport:
    """Run the job beside a broker."""
    async with broker_with_bus("bench") as (server, bus):
        answerer = Answerer(bus, tracking=plan.tracking)
        answering = asyncio.create_task(answerer.run())
        measured = await asyncio.to_thread(run_job, plan, server.settings)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    windows = {"num_windows": answerer.num_reports, "num_actions_applied": answerer.num_applied}
    figures = windows | summarise(measured, plan)
    targets = [
        Target(
            name="CPU time of the training thread, % of the step",
            value=figures["thread_percent_of_step"],
            at_most=TARGET_THREAD_PERCENT,
        ),
        Target(
            name="wall clock in pairs: upper bound of the interval, %",
            value=figures["paired_wall"]["interval_percent"][1],
            at_most=TARGET_PAIRED_PERCENT,
        ),
    ]
    return BenchmarkReport(figures, text_of(figures), targets)


def run_job(plan: OverheadPlan, bus: BusSettings) -> RankTimings:
    """Run all ranks in processes of their own.

    Raises:
        BenchmarkError: when a rank failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.overhead.ranks", "torch._dynamo"])  # imported once, not by each rank
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=run_rank, args=(rank, directory, plan, bus)) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise BenchmarkError("a rank of the benchmark failed; see its traceback above")
        return msgspec.json.decode(Path(directory, "measured.json").read_bytes(), type=RankTimings)


def summarise(measured: RankTimings, plan: OverheadPlan) -> dict[str, Any]:
    """Both figures, the direct one in percent of the step that was asked for."""
    on, off = (
        np.array([(timing.wall_s, timing.cpu_s, timing.thread_s) for timing in timings]) / BLOCK_STEPS
        for timings in (measured.on, measured.off)
    )
    direct = {
        f"direct_{clock}": _direct(parts, measured.elsewhere_s[clock], plan.step_s)
        for clock, parts in measured.here_s.items()
    }
    paired = {f"paired_{clock}": difference(on[:, at], off[:, at]) for at, clock in enumerate(PAIRED)}
    of_step = paired["paired_thread"]["off_ms"] / (1000 * plan.step_s)
    return {
        "thread_percent_of_step": of_step * paired["paired_thread"]["mean_percent"],
        "thread_percent_interval": [of_step * bound for bound in paired["paired_thread"]["interval_percent"]],
        "step_ms": 1000 * plan.step_s,
        "tracking": plan.tracking,
        "window_steps": WINDOW_STEPS,
        "num_ranks": NUM_RANKS,
        "num_parameters": sum(parameter.numel() for parameter in make_model(plan.hidden).parameters()),
        "num_pairs": len(on),
        "block_steps": BLOCK_STEPS,
        "launch_part": LAUNCH,
        **direct,
        **paired,
    }


def _direct(here_s: dict[str, float], elsewhere_s: dict[str, float], step_s: float) -> dict[str, Any]:
    """One clock's sums, with the launch of the all-reduce (gross) and without (ours)."""
    gross_s = sum(here_s.values())
    ours_s = gross_s - here_s[LAUNCH]
    return {
        "training_thread_us": {part: 1e6 * value for part, value in here_s.items()},
        "other_threads_us": {part: 1e6 * value for part, value in elsewhere_s.items()},
        "gross_us": 1e6 * gross_s,
        "gross_percent": 100 * gross_s / step_s,
        "ours_us": 1e6 * ours_s,
        "ours_percent": 100 * ours_s / step_s,
    }


def text_of(figures: dict[str, Any]) -> str:
    """The figures for people."""
    setting = (
        f"step paced to {figures['step_ms']:.0f} ms, k = {figures['window_steps']}, {figures['num_ranks']} gloo ranks, "
        f"{figures['num_parameters']} parameters; {figures['num_actions_applied']} actions applied in "
        f"{figures['num_windows']} windows"
    )
    pairs = f"{figures['num_pairs']} pairs of {figures['block_steps']} steps, 95 % bootstrap interval of the mean"
    direct = aligned(["per step", "us wall", "us CPU", "% wall", "% CPU"], _direct_rows(figures))
    lines = [setting, "", direct, "", f"on against off, {pairs}:"]
    named = (("wall clock", "wall"), ("CPU, all threads", "cpu"), ("CPU, training", "thread"))
    for name, paired in ((name, figures[f"paired_{clock}"]) for name, clock in named):
        low, high = paired["interval_percent"]
        lines.append(
            f"  {name:16} {paired['off_ms']:.2f} -> {paired['on_ms']:.2f} ms: mean {paired['mean_percent']:+.2f} %, "
            f"[{low:+.2f}, {high:+.2f}], median {paired['median_percent']:+.2f} %"
        )
    percent, (low, high) = figures["thread_percent_of_step"], figures["thread_percent_interval"]
    lines.append(f"CPU time of the training thread: {percent:.2f} % of the step, [{low:.2f}, {high:.2f}]")
    return "\n".join(lines)


def _direct_rows(figures: dict[str, Any]) -> list[list[str]]:
    clocks = (figures["direct_wall"], figures["direct_cpu"])

    def row(name: str, values_us: list[float]) -> list[str]:
        percents = [value_us / figures["step_ms"] / 10 for value_us in values_us]
        return [f"  {name}", *(number(value, 1) for value in values_us), *(number(value, 3) for value in percents)]

    def parts(thread: str) -> list[list[str]]:
        names = sorted({part for clock in clocks for part in clock[thread]} - {LAUNCH})
        return [row(part, [clock[thread].get(part, 0.0) for clock in clocks]) for part in names]

    others = parts("other_threads_us")
    return [
        ["on the training thread", *[""] * 4],
        *parts("training_thread_us"),
        row("sum: our code", [clock["ours_us"] for clock in clocks]),
        row(f"{LAUNCH}, in DDP too", [clock["training_thread_us"][LAUNCH] for clock in clocks]),
        row("sum with the launch", [clock["gross_us"] for clock in clocks]),
        *([["in other threads", *[""] * 4], *others] if others else []),
    ]


def main() -> int:
    """Measure, print, write; exit code 1 when a target is missed."""
    parser = benchmark_parser(
        "overhead", __doc__, ("--pairs", 240, "pairs of blocks"), ("--step-ms", 50.0, "length of a step")
    )
    parser.add_argument(
        "--model", choices=HIDDEN, default="small", help="27 k parameters as in the demo, or 0.4 M (default: small)"
    )
    parser.add_argument(
        "--tracking", action="store_true", help="let the ranks divide the global batch after every step"
    )
    options = parser.parse_args()
    if options.pairs < 2 or options.pairs % 2 or options.step_ms <= 0:
        parser.error("--pairs must be even and at least 2, and --step-ms above 0")
    plan = OverheadPlan(options.pairs, options.step_ms / 1000, HIDDEN[options.model], options.tracking)
    seconds = 3 * plan.num_pairs * BLOCK_STEPS * plan.step_s
    sys.stderr.write(f"overhead: {plan.num_pairs} pairs of blocks, about {seconds:.0f} s\n")
    return run_benchmark("overhead", options, lambda: asyncio.run(measure(plan)))


if __name__ == "__main__":
    sys.exit(main())
