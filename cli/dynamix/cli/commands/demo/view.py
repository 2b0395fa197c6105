"""What is seen of the demo: an introduction, progress by window, and a table at the end."""

from collections.abc import Sequence

from dynamix.cli.formatting import UNKNOWN, bar, formatted
from dynamix.cli.progress import ProgressLine
from dynamix.cli.tables import console_for, new_table
from dynamix.schemas.messages import Report

from .plan import LOOKS, DemoPlan, DemoRun, Variant

PLAIN_EVERY_S = 5.0
BAR_WIDTH = 10


def introduction(plan: DemoPlan, variants: Sequence[Variant]) -> str:
    """What will be run, what is real about it, and what the script says for each run."""
    width = max(len(variant.policy) for variant in variants)
    calls = "".join(
        f"  {variant.policy:{width}}  {_call(plan, variant)}\n  {'':{width}}  {variant.what}\n" for variant in variants
    )
    return (
        f"A {plan.num_ranks}-process gloo job trains a small CNN on Fashion-MNIST to {plan.target_accuracy:.0%} "
        f"held-out accuracy, the mean of {LOOKS} looks, {len(variants)} times with one seed.\n"
        f"Its ranks are PACED: they sleep to {plan.pace_s_per_sample * 1000:g} ms per sample, rank "
        f"{plan.slow_rank} to {plan.slowdown:g} times that. Data, gradients, processes and messages are real.\n"
        f"One call differs in its script:\n{calls}"
        "Shown per window: local batch sizes, step time, held-out accuracy, actions applied."
    )


def _call(plan: DemoPlan, variant: Variant) -> str:
    named = "".join(f', {name}="{value}"' for name, value in variant.arguments.items())
    return f"attach(model, optimizer, dataset, local_batch_size={plan.local_batch_size}{named})"


class DemoProgress(ProgressLine):
    """A line per run, redrawn for each window."""

    def __init__(self, plan: DemoPlan) -> None:
        super().__init__(PLAIN_EVERY_S, keep=True)
        self._plan = plan
        self._policy = ""

    def show_window(self, policy: str, num_applied: int, report: Report, is_final: bool) -> None:
        """Show one window of the run under a policy; `is_final`: with what the run ended with."""
        if policy != self._policy:
            self.finish()
            self._policy = policy
        sizes = "/".join(str(row.local_batch_size) for row in report.rows)
        totals, done = report.totals, report.window + 1
        least = self._plan.min_windows
        of_least = f" of at least {least}" if done < least else ""
        held_out = "" if report.held_out_accuracy is None else f", {report.held_out_accuracy:.1%}"
        self.show(
            f"{policy}: {bar(min(1.0, done / least), BAR_WIDTH)} window {done}{of_least}: {sizes}, "
            f"{totals.time_s / totals.num_steps * 1000:.0f} ms{held_out}, {num_applied} applied",
            now=is_final,
        )


def show(runs: Sequence[DemoRun], *, stderr: bool) -> None:
    """Print a line for each run, with ratios to the first."""
    headings = ("policy", "to target", "final", "median step", "applied", "last sizes")
    table = new_table(*headings, left=("policy",), title="Same seed, same data, same target")
    first = runs[0].summary
    for summary in (run.summary for run in runs):
        table.add_row(
            summary.policy,
            _with_ratio(summary.time_to_target_s, first.time_to_target_s, "{:.1f} s"),
            formatted(summary.final_accuracy, "{:.1%}"),
            _with_ratio(summary.median_step_time_s * 1000, first.median_step_time_s * 1000, "{:.0f} ms"),
            f"{summary.num_actions_applied} of {summary.num_windows}",
            "/".join(map(str, summary.local_batch_sizes[-1])) if summary.local_batch_sizes else UNKNOWN,
        )
    console_for(stderr=stderr).print(table)


def _with_ratio(value: float | None, first: float | None, form: str) -> str:
    if value is None:
        return "not reached"
    ratio = "" if first is None or value == first else f" ({value / first:.2f}x)"
    return form.format(value) + ratio
