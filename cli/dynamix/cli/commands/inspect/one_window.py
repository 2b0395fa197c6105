"""One window in full: every rank's metrics and reward, the decision and what came of it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.table import Table

from dynamix.cli.formatting import UNKNOWN, formatted, sizes_text
from dynamix.cli.inspection.window import Window
from dynamix.cli.tables import console_for, new_table, print_line
from dynamix.schemas.messages import Action, RankMetrics, RankReward


class DetailColumn(NamedTuple):
    """A column of the table of ranks."""

    title: str
    cell: Callable[[RankMetrics], str]


COLUMNS = (
    DetailColumn("size", lambda rank: str(rank.training.local_batch_size)),
    DetailColumn("next", lambda rank: str(rank.training.pending_local_batch_size)),
    DetailColumn("samples", lambda rank: str(rank.training.num_samples)),
    DetailColumn("loss", lambda rank: formatted(rank.training.loss, "{:.3f}")),
    DetailColumn("accuracy", lambda rank: formatted(rank.training.accuracy, "{:.1%}")),
    DetailColumn("step, ms", lambda rank: formatted(rank.training.step_time_s, "{:.2f}", 1000)),
    DetailColumn("data", lambda rank: formatted(rank.training.data_time_s, "{:.2f}", 1000)),
    DetailColumn("compute", lambda rank: formatted(rank.training.compute_time_s, "{:.2f}", 1000)),
    DetailColumn("sync", lambda rank: formatted(rank.training.sync_time_s, "{:.2f}", 1000)),
    DetailColumn("update", lambda rank: formatted(rank.training.update_time_s, "{:.2f}", 1000)),
    DetailColumn("cpu", lambda rank: formatted(rank.system.cpu_time_ratio, "{:.2f}")),
    DetailColumn("memory", lambda rank: formatted(rank.system.memory_ratio, "{:.1%}")),
    DetailColumn("sent, B", lambda rank: str(rank.network.tx_bytes) if rank.network else UNKNOWN),
    DetailColumn("retrans", lambda rank: str(rank.network.retransmits) if rank.network else UNKNOWN),
    DetailColumn("rtt, us", lambda rank: formatted(rank.network.srtt_us if rank.network else None, "{:.0f}")),
)


def show(window: Window, *, stderr: bool) -> None:
    """Print it."""
    console = console_for(stderr=stderr)
    if window.detailed:
        console.print(_ranks(window))
    for line in lines(window):
        print_line(console, line)


def lines(window: Window) -> Iterator[str]:
    """The window's metrics, the decision made on it, and the decisions adopted in it."""
    where = f"window {window.window} of generation {window.generation}"
    if (metrics := window.metrics) is not None:
        yield (
            f"{where}: global batch {metrics.global_batch_size}, step {metrics.step_time_s * 1000:.1f} ms, "
            f"{formatted(metrics.throughput, '{:.0f}')} samples/s, "
            f"noise scale {formatted(metrics.noise_scale, '{:.0f}')}, mean reward {formatted(window.mean_reward)}"
        )
    yield f"decided: {_action(window.action)}" if window.action else f"no action for {where}"
    for applied in window.applied:
        refused = ", ".join(f"{count} {reason}" for reason, count in applied.num_refused.items())
        yield (
            f"from step {applied.effective_step} on under the action of window {applied.decided_window}: "
            f"{sizes_text(applied.local_batch_sizes)}" + (f"; refused so far: {refused}" if refused else "")
        )


def _action(action: Action) -> str:
    levers = "".join(f", {name} {value:g}" for name, value in action.levers.items())
    gap = ", after a gap" if action.gap else ""
    return (
        f"{sizes_text(action.local_batch_sizes)} by {action.policy} version {action.policy_version} ({action.split}), "
        f"watermark {action.watermark}{gap}{levers}, {len(action.carry)} bytes of memory, "
        f"{action.hash.hex()[:16]} after {action.previous_hash.hex()[:16] or 'nothing'}"
    )


def _ranks(window: Window) -> Table:
    terms = list(dict.fromkeys(name for _, reward in window.detailed.values() if reward for name in reward.terms))
    table = new_table("rank", *(column.title for column in COLUMNS), "reward", *terms)
    for rank, (metrics, reward) in sorted(window.detailed.items()):
        cells = [column.cell(metrics) if metrics else UNKNOWN for column in COLUMNS]
        table.add_row(str(rank), *cells, *_reward(reward, terms))
    return table


def _reward(reward: RankReward | None, terms: list[str]) -> list[str]:
    if reward is None:
        return [UNKNOWN] * (1 + len(terms))
    return [formatted(reward.reward), *(formatted(reward.terms.get(name)) for name in terms)]
