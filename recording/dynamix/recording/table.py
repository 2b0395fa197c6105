"""A capture as a table: one row per rank and window, units in the columns' names; for pandas, Arrow or neither."""

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Literal, get_args, get_type_hints

import msgspec

from dynamix.collector.window import Observation, metric_window
from dynamix.schemas.messages import (
    GlobalMetrics,
    NetworkMetrics,
    NodeMetrics,
    Report,
    SystemMetrics,
    TrainingMetrics,
)

from .capture import CaptureReader, WindowKey
from .job_view import JobView, Window

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Value = str | int | float | None
ColumnKind = Literal["text", "whole", "number"]

_RENAMED = {"throughput": "samples_per_s"}


def load(path: str | Path) -> "CaptureTable":
    """Read a capture as a table: `dynamix.recording.load("job.dxc").to_pandas()`.

    A row is what one rank did in one window: its sizes, times, system and network as in `MetricWindow`, the node's and
    the job's metrics with `node_` and `job_` in front, its reward and each term (`reward_...`), what was decided on the
    window (`decided_...`), and `ruling_window`: the window on which the sizes in force were decided. Where the
    collector's window is missing, the row has what the rank reported. Rows are in the order of generation, window and
    rank; what is not known is `None`.

    What follows the first damage or the cut, and messages that cannot be decoded, are left out with a warning.

    Raises:
        CaptureError: when the file is no capture.
        OSError: when it cannot be read.
    """
    reports: list[Report] = []
    with CaptureReader(path) as reader:
        job = reader.header.job
        view = JobView(job, most_windows=1 << 62, keep_ranks=True)
        for record, message in reader.messages():
            if message is not None:
                view.fold(message, record.timestamp_ns)
            if isinstance(message, Report):
                reports.append(message)
    if reader.fault is not None:
        warnings.warn(str(reader.fault), stacklevel=2)
    if reader.malformed:
        warnings.warn(f"{path}: {len(reader.malformed)} messages cannot be decoded, rows may lack them", stacklevel=2)
    for report in reports:  # what the rank reported, where the collector's window is missing
        view.fold(metric_window(report, Observation()))
    rewards = (rank for window in view.history for node in window.nodes.values() for rank in node.rewards)
    terms = sorted({f"reward_{name}" for rank in rewards for name in rank.terms})
    table = CaptureTable({name: [] for name in (*_KINDS, *terms)})
    adopted = sorted((key, max(decided)[1]) for key, decided in view.adopted_in.items())
    for window in view.history:
        for row in _rows(window, adopted):
            for name, column in table.items():
                column.append(job if name == "job" else row.get(name))
    return table


class CaptureTable(dict[str, list[Value]]):
    """Columns of one length by name, in an order that is the same for every capture but for the reward's terms."""

    def __repr__(self) -> str:
        return f"<CaptureTable of {self.num_rows} rows, {len(self)} columns>"

    @property
    def num_rows(self) -> int:
        """Rows of each column."""
        return len(self["window"])

    def rows(self) -> Iterator[dict[str, Value]]:
        """Each row as a dictionary."""
        for values in zip(*self.values(), strict=True):
            yield dict(zip(self, values, strict=True))

    def to_pandas(self) -> "pd.DataFrame":
        """A DataFrame: whole numbers with gaps are of the type `Int64`. Raises ImportError without pandas."""
        import pandas as pd  # noqa: PLC0415 - an extra

        types = {"text": "object", "whole": "Int64", "number": "float64"}
        frame = pd.DataFrame({name: pd.Series(self[name], dtype=types[_kind(name)]) for name in self})
        complete = [name for name in self if _kind(name) == "whole" and None not in self[name]]
        return frame.astype(dict.fromkeys(complete, "int64"))

    def to_arrow(self) -> "pa.Table":
        """An Arrow table, with nulls for what is not known. Raises ImportError without pyarrow."""
        import pyarrow as pa  # noqa: PLC0415 - an extra

        types = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64()}
        return pa.table({name: pa.array(self[name], type=types[_kind(name)]) for name in self})


def _rows(window: Window, adopted: Sequence[tuple[WindowKey, int]]) -> Iterator[dict[str, Value]]:
    """The rows of a window, by rank; `adopted` are windows in which a decision came into effect, with the decided."""
    begun = bisect_right(adopted, ((window.generation, window.window), 1 << 62))
    (generation, _), decided = adopted[begun - 1] if begun else ((-1, -1), -1)
    shared: dict[str, Value] = {
        "generation": window.generation,
        "window": window.window,
        "num_steps": window.num_steps,
        "reported_unix_s": window.started_ns / 1e9 if window.started_ns else None,
        "ruling_window": decided if generation == window.generation else None,
        **_values(window.metrics, "job_"),
    }
    sizes: Sequence[int] = ()
    if (action := window.action) is not None:
        sizes = action.local_batch_sizes
        shared |= {
            "decided_global_batch_size": sum(sizes),
            "decided_split": action.allocation.split,
            "decided_exchange": action.allocation.exchange.label,
            "decided_policy": action.policy,
            "decided_policy_version": action.policy_version,
            "decided_reason": action.reason,
        }
    measured = [(rank, name, node) for name, node in window.nodes.items() for rank in node.ranks]
    for rank, name, node in sorted(measured, key=lambda found: found[0].rank):
        reward: dict[str, Value] = {}
        for one in node.rewards:
            if one.rank == rank.rank:
                reward = {"reward_formula": window.formula, "reward": one.reward}
                reward |= {f"reward_{term}": value for term, value in one.terms.items()}
        yield {
            "rank": rank.rank,
            "node": name,
            "probe": node.probe,
            "decided_local_batch_size": sizes[rank.rank] if rank.rank < len(sizes) else None,
            **shared,
            **_values(rank.training),
            **_values(rank.system),
            **_values(rank.network),
            **_values(node.metrics, "node_"),
            **reward,
        }


def _values(message: msgspec.Struct | None, prefix: str = "") -> dict[str, Value]:
    if message is None:
        return {}
    return {prefix + _RENAMED.get(name, name): getattr(message, name) for name in message.__struct_fields__}


def _kind(name: str) -> ColumnKind:
    return _KINDS.get(name, "number")  # a term of the reward


def _kinds_of(message: type[msgspec.Struct], prefix: str = "") -> dict[str, ColumnKind]:
    """The columns of a message's fields: whole numbers where it has an integer, else numbers."""
    found: dict[str, ColumnKind] = {}
    for name, annotation in get_type_hints(message).items():
        types = {each for each in (get_args(annotation) or (annotation,)) if each is not NoneType}
        found[prefix + _RENAMED.get(name, name)] = "whole" if int in types else "number"
    return found


_KINDS: dict[str, ColumnKind] = {
    "job": "text",
    "generation": "whole",
    "window": "whole",
    "rank": "whole",
    "node": "text",
    "num_steps": "whole",
    "reported_unix_s": "number",
    **_kinds_of(TrainingMetrics),
    "ruling_window": "whole",
    **dict.fromkeys(("decided_local_batch_size", "decided_global_batch_size"), "whole"),
    "decided_split": "text",
    "decided_exchange": "text",
    "decided_policy": "text",
    "decided_policy_version": "whole",
    "decided_reason": "text",
    "reward_formula": "text",
    "reward": "number",
    **_kinds_of(SystemMetrics),
    "probe": "text",
    **_kinds_of(NetworkMetrics),
    **_kinds_of(GlobalMetrics, "job_"),
    **_kinds_of(NodeMetrics, "node_"),
}
