"""One window in full: every rank's metrics and reward, the decision and what came of it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from dynamix.cli.inspection.window import Window
from dynamix.schemas.messages import Action, RankMetrics, RankReward

from .view import output
from .words import UNKNOWN, number, sizes


class Column(NamedTuple):
    """A column of the table of ranks."""

    title: str
    cell: Callable[[RankMetrics], str]


def _milliseconds(value: float | None) -> str:
    return number(None if value is None else value * 1000, "{:.2f}")


COLUMNS = (
    Column("size", lambda rank: str(rank.training.local_batch_size)),
    Column("next", lambda rank: str(rank.training.pending_local_batch_size)),
    Column("samples", lambda rank: str(rank.training.num_samples)),
    Column("loss", lambda rank: number(rank.training.loss, "{:.3f}")),
    Column("accuracy", lambda rank: number(rank.training.accuracy, "{:.1%}")),
    Column("step, ms", lambda rank: _milliseconds(rank.training.step_time_s)),
    Column("data", lambda rank: _milliseconds(rank.training.data_time_s)),
    Column("compute", lambda rank: _milliseconds(rank.training.compute_time_s)),
    Column("sync", lambda rank: _milliseconds(rank.training.sync_time_s)),
    Column("update", lambda rank: _milliseconds(rank.training.update_time_s)),
    Column("cpu", lambda rank: number(rank.system.cpu_time_ratio, "{:.2f}")),
    Column("memory", lambda rank: number(rank.system.memory_ratio, "{:.1%}")),
    Column("sent, B", lambda rank: str(rank.network.tx_bytes) if rank.network else UNKNOWN),
    Column("resent", lambda rank: str(rank.network.retransmits) if rank.network else UNKNOWN),
    Column("rtt, us", lambda rank: number(rank.network.srtt_us if rank.network else None, "{:.0f}")),
)


def show(window: Window, *, stderr: bool) -> None:
    """Print it."""
    console = output(stderr=stderr)
    if window.detailed:
        console.print(_ranks(window))
    for line in lines(window):
        console.print(line, highlight=False, markup=False)


def lines(window: Window) -> Iterator[str]:
    """The decision, and which decision ruled."""
    where = f"window {window.window} of generation {window.generation}"
    if (metrics := window.metrics) is not None:
        yield (
            f"{where}: global batch {metrics.global_batch_size}, step {metrics.step_time_s * 1000:.1f} ms, "
            f"{number(metrics.throughput, '{:.0f}')} samples/s, noise scale {number(metrics.noise_scale, '{:.0f}')}, "
            f"mean reward {number(window.mean_reward)}"
        )
    yield f"decided: {_action(window.action)}" if window.action else f"no action for {where}"
    for applied in window.applied:
        refused = ", ".join(f"{count} {reason}" for reason, count in applied.num_refused.items())
        yield (
            f"ruled from step {applied.effective_step} on by the action of window {applied.decided_window}: "
            f"{sizes(applied.local_batch_sizes)}" + (f"; refused so far: {refused}" if refused else "")
        )


def _action(action: Action) -> str:
    levers = "".join(f", {name} {value:g}" for name, value in action.levers.items())
    gap = ", behind a gap" if action.gap else ""
    return (
        f"{sizes(action.local_batch_sizes)} by {action.policy} version {action.policy_version} ({action.split}), read "
        f"up to {action.watermark}{gap}{levers}, {len(action.carry)} bytes of memory, "
        f"{action.hash.hex()[:16]} after {action.previous_hash.hex()[:16] or 'nothing'}"
    )


def _ranks(window: Window) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    terms = list(dict.fromkeys(name for _, reward in window.detailed.values() if reward for name in reward.terms))
    for title in ("rank", *(column.title for column in COLUMNS), "reward", *terms):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, (metrics, reward) in sorted(window.detailed.items()):
        cells = [column.cell(metrics) if metrics else UNKNOWN for column in COLUMNS]
        table.add_row(str(rank), *cells, *_reward(reward, terms))
    return table


def _reward(reward: RankReward | None, terms: list[str]) -> list[str]:
    if reward is None:
        return [UNKNOWN] * (1 + len(terms))
    return [number(reward.reward), *(number(reward.terms.get(name)) for name in terms)]
