"""A capture as a table: one row per rank and window, units in the columns' names; for pandas, Arrow or neither."""

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Literal, get_args, get_type_hints

import msgspec

from dynamix.collector.probes import Traffic
from dynamix.collector.window import Observation, metric_window
from dynamix.recording.capture import CaptureReader, Record
from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages import (
    Action,
    Applied,
    GlobalMetrics,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    Report,
    Reward,
    SystemMetrics,
    TrainingMetrics,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Value = str | int | float | None
ColumnKind = Literal["text", "whole", "number"]
RowKey = tuple[int, int, int]
"""Generation, window, rank."""

_UNSEEN = Observation(systems={}, node=NodeMetrics(), network=Traffic("none", {}, interval_s=None, note=""))
"""What is known of a report's processes where the collector's window is missing."""

_RENAMED = {"job_throughput": "job_samples_per_s"}


def load(path: str | Path) -> "CaptureTable":
    """Read a capture as a table: `dynamix.recording.load("job.dxc").to_pandas()`.

    A row is what one rank did in one window: its sizes, times, system and network as in `MetricWindow`, the node's and
    the job's metrics with `node_` and `job_` in front, its reward and each term (`reward_...`), what was decided on the
    window (`decided_...`), and `ruling_window`: the window on which the sizes in force were decided. Where the
    collector's window is missing, the row has what the rank reported. Rows are in the order of generation, window and
    rank; what is not known is `None`.

    Damaged blocks, what follows where the file is cut off, and messages that cannot be decoded are left out, each with
    a warning.

    Raises:
        CaptureError: when the file is no capture.
        OSError: when it cannot be read.
    """
    with CaptureReader(path) as reader:
        table = table_of(reader.header.job, reader.good_records(), str(path))
    for fault in reader.faults:
        warnings.warn(str(fault), stacklevel=2)
    return table


def table_of(job: str, records: Iterable[Record], origin: str) -> "CaptureTable":
    """A job's records as a table, as `load` makes it of a capture; `origin` names them in the warning."""
    builder = _TableBuilder()
    num_malformed = sum(not builder.add_record(record) for record in records)
    if num_malformed:
        warnings.warn(f"{origin}: {num_malformed} messages cannot be decoded, rows may lack them", stacklevel=3)
    return builder.table(job)


class CaptureTable(Mapping[str, Sequence[Value]]):
    """Columns of one length by name, in an order that is the same for every capture but for the reward's terms."""

    def __init__(self, columns: Mapping[str, Sequence[Value]], kinds: Mapping[str, ColumnKind]) -> None:
        self._columns = columns
        self._kinds = kinds

    def __getitem__(self, name: str) -> Sequence[Value]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns."""
        return len(self._columns)

    def __repr__(self) -> str:
        return f"<CaptureTable of {self.num_rows} rows, {len(self)} columns>"

    @property
    def num_rows(self) -> int:
        """Rows of each column."""
        return len(self._columns["window"])

    def rows(self) -> Iterator[dict[str, Value]]:
        """Each row as a dictionary."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def to_pandas(self) -> "pd.DataFrame":
        """A DataFrame: whole numbers with gaps are of the type `Int64`. Raises ImportError without pandas."""
        import pandas as pd  # noqa: PLC0415 - an extra

        types = {"text": "object", "whole": "Int64", "number": "float64"}
        frame = pd.DataFrame({name: pd.Series(self[name], dtype=types[self._kinds[name]]) for name in self})
        complete = [name for name in self if self._kinds[name] == "whole" and None not in self[name]]
        return frame.astype(dict.fromkeys(complete, "int64"))

    def to_arrow(self) -> "pa.Table":
        """An Arrow table, with nulls for what is not known. Raises ImportError without pyarrow."""
        import pyarrow as pa  # noqa: PLC0415 - an extra

        types = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64()}
        return pa.table({name: pa.array(self[name], type=types[self._kinds[name]]) for name in self})


class _TableBuilder:
    """Gathers rows; the messages of a window may come in any order."""

    def __init__(self) -> None:
        self._windows: dict[RowKey, dict[str, Value]] = {}
        self._reports: dict[RowKey, dict[str, Value]] = {}
        """What is shown of a rank whose window is missing."""
        self._rewards: dict[RowKey, dict[str, Value]] = {}
        self._actions: dict[tuple[int, int], Action] = {}
        self._applied: dict[tuple[int, int], int] = {}
        """Generation and the window from which on it ruled, and the one on which it was decided."""
        self._started_s: dict[tuple[int, int], float] = {}

    def add_record(self, record: Record) -> bool:
        """Take a record into account; False when it cannot be decoded."""
        try:
            message = codec.decode_any(record.subject, record.payload)
        except MalformedMessageError:
            return False
        match message:
            case Report():
                self._started_s.setdefault((message.generation, message.window), record.timestamp_ns / 1e9)
                self._add_window(metric_window(message, _UNSEEN), self._reports)
            case MetricWindow():
                self._add_window(message, self._windows)
            case Reward():
                for rank in message.ranks:
                    terms = {f"reward_{name}": value for name, value in rank.terms.items()}
                    key = (message.generation, message.window, rank.rank)
                    self._rewards[key] = {"reward_formula": message.formula, "reward": rank.reward, **terms}
            case Action():
                self._actions[message.generation, message.window] = message
            case Applied():
                self._applied[message.generation, message.effective_window] = message.decided_window
        return True

    def table(self, job: str) -> CaptureTable:
        """All rows found, as columns."""
        terms = sorted({name for row in self._rewards.values() for name in row} - {"reward_formula", "reward"})
        kinds: dict[str, ColumnKind] = {**_KINDS, **dict.fromkeys(terms, "number")}
        rows = {**self._reports, **self._windows}
        ruling = sorted(self._applied.items())
        columns: dict[str, list[Value]] = {name: [] for name in kinds}
        for key in sorted(rows):
            row = {"job": job, **self._of_window(key, ruling), **rows[key], **self._rewards.get(key, {})}
            for name, column in columns.items():
                column.append(row.get(name))
        return CaptureTable(columns, kinds)

    def _add_window(self, window: MetricWindow, rows: dict[RowKey, dict[str, Value]]) -> None:
        shared: dict[str, Value] = {
            "node": window.node,
            "num_steps": window.num_steps,
            "probe": window.probe,
            **_values(window.node_metrics, "node_"),
            **_values(window.job_metrics, "job_"),
        }
        for rank in window.ranks:
            rows[window.generation, window.window, rank.rank] = {
                **_values(rank.training),
                **_values(rank.system),
                **_values(rank.network),
                **shared,
            }

    def _of_window(self, key: RowKey, applied: Sequence[tuple[tuple[int, int], int]]) -> dict[str, Value]:
        """What the decisions say about a rank's window; `applied` is sorted."""
        generation, window, rank = key
        begun = bisect_right(applied, (generation, window), key=itemgetter(0))
        (since, decided) = applied[begun - 1] if begun else ((-1, -1), -1)
        found: dict[str, Value] = {
            "generation": generation,
            "window": window,
            "rank": rank,
            "reported_unix_s": self._started_s.get((generation, window)),
            "ruling_window": decided if since[0] == generation else None,
        }
        if (action := self._actions.get((generation, window))) is not None:
            sizes = action.local_batch_sizes
            found |= {
                "decided_local_batch_size": sizes[rank] if rank < len(sizes) else None,
                "decided_global_batch_size": sum(sizes),
                "decided_split": action.split,
                "decided_exchange": action.exchange.label,
                "decided_policy": action.policy,
                "decided_policy_version": action.policy_version,
                "decided_reason": action.reason,
            }
        return found


def _values(message: msgspec.Struct | None, prefix: str = "") -> dict[str, Value]:
    if message is None:
        return {}
    return {_column(prefix, name): getattr(message, name) for name in message.__struct_fields__}


def _column(prefix: str, name: str) -> str:
    return _RENAMED.get(prefix + name, prefix + name)


def _kinds_of(message: type[msgspec.Struct], prefix: str = "") -> dict[str, ColumnKind]:
    """The columns of a message's fields: whole numbers where it has an integer, else numbers."""
    found: dict[str, ColumnKind] = {}
    for name, annotation in get_type_hints(message).items():
        types = {each for each in (get_args(annotation) or (annotation,)) if each is not NoneType}
        found[_column(prefix, name)] = "whole" if int in types else "number"
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
