"""The picture of the curve: latency and CPU time over the number of workers, both axes logarithmic."""

from collections.abc import Sequence
from pathlib import Path

from bench.scale.result import MAX_P95_MS, Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynamix.runtime.output_files import whole

_COLOURS = ("#4c72b0", "#c44e52", "#0b6e4f", "#8172b3")


def draw(results: Sequence[Result], path: Path) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    latency, cpu = figure.subplots(1, 2)
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        curve = sorted((one for one in results if one.policy == policy), key=lambda one: one.workers)
        workers, colour = [one.workers for one in curve], _COLOURS[number % len(_COLOURS)]
        latency.plot(
            workers, [one.decision_latency_p50_ms for one in curve], "o-", color=colour, label=f"{policy}, p50"
        )
        latency.plot(
            workers, [one.decision_latency_p95_ms for one in curve], "s--", color=colour, label=f"{policy}, p95"
        )
        cpu.plot(workers, [_cpu_ms(one, one.cpu_percent) for one in curve], "o-", color=colour, label=policy)
        cpu.plot(
            workers,
            [_cpu_ms(one, one.broker_cpu_percent) for one in curve],
            "^:",
            color=colour,
            label=f"broker, under {policy}",
        )
    latency.axhline(MAX_P95_MS, color="black", linewidth=0.8, linestyle="--")
    latency.set(title="Last state of a window to its action", ylabel="ms, by the broker's clock")
    cpu.set(title="CPU time of a window: arbitrator, broker", ylabel="ms")
    _finish(latency, results, max(one.decision_latency_p50_ms for one in results))
    _finish(cpu, results, max(_cpu_ms(one, one.cpu_percent) for one in results))
    with whole(path) as file:
        figure.savefig(file, dpi=110, format="png")


def _cpu_ms(result: Result, percent: float) -> float:
    """CPU time per window of one job; what /proc shows as 0 is below its tick and not drawn."""
    return 10 * percent / (result.rate * result.jobs) or float("nan")


def _finish(axes: Axes, results: Sequence[Result], top: float) -> None:
    """Scales, and a line that grows with the number of workers up to `top`."""
    low, high = min(one.workers for one in results), max(one.workers for one in results)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, high], [top * low / high, top], color="#bbbbbb", linewidth=1, label="linear")
    axes.set(xlabel="workers")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
