"""The figures of bench.overhead as a table for people."""

from typing import Any


def print_table(summary: dict[str, Any]) -> None:
    """The summary for people."""
    loads = " to ".join(f"{load:.1f}" for load in summary["load_average"])
    print(
        f"\nstep paced to {summary['step_ms']:.0f} ms, k = {summary['window_steps']}, "
        f"{summary['num_ranks']} gloo ranks, {summary['num_parameters']} parameters;"
    )
    print(f"{summary['num_actions_applied']} actions applied in {summary['num_windows']} windows; load average {loads}")
    _print_direct(summary)
    print(
        f"\non against off, {summary['num_pairs']} pairs of {summary['block_steps']} steps (on off off on), "
        "95 % bootstrap interval of the mean:"
    )
    _print_paired("wall clock", summary["paired_wall"])
    _print_paired("CPU, all threads", summary["paired_cpu"])
    print()
    for target in summary["targets"]:
        verdict = "met" if target["met"] else "MISSED"
        print(f"{target['name']}: {target['percent']:.2f} %, target <= {target['limit_percent']:.0f} %: {verdict}")


def _print_direct(summary: dict[str, Any]) -> None:
    wall, cpu, launch = summary["direct_wall"], summary["direct_cpu"], summary["launch_part"]

    def line(name: str, wall_us: float, cpu_us: float) -> None:
        percents = (us / summary["step_ms"] / 10 for us in (wall_us, cpu_us))
        print(f"  {name:36}{wall_us:9.1f}{cpu_us:9.1f}" + "".join(f"{percent:9.3f}" for percent in percents))

    def parts(thread: str, besides: str = "") -> None:
        for part in sorted({*wall[thread], *cpu[thread]} - {besides}):
            line(part, wall[thread].get(part, 0.0), cpu[thread].get(part, 0.0))

    print(f"\n{'per step':38}{'us wall':>9}{'us CPU':>9}{'% wall':>9}{'% CPU':>9}\non the training thread")
    parts("training_thread_us", besides=launch)
    line("sum: our code", wall["ours_us"], cpu["ours_us"])
    line(f"{launch}, in DDP too", wall["training_thread_us"][launch], cpu["training_thread_us"][launch])
    line("sum with the launch", wall["gross_us"], cpu["gross_us"])
    print("in gloo's threads")
    parts("other_threads_us")


def _print_paired(clock: str, paired: dict[str, Any]) -> None:
    low, high = paired["interval_percent"]
    print(
        f"  {clock:15} {paired['off_ms']:.2f} -> {paired['on_ms']:.2f} ms: mean {paired['mean_percent']:+.2f} %, "
        f"[{low:+.2f}, {high:+.2f}], median {paired['median_percent']:+.2f} %"
    )
