"""The way of a measured value from a rank's row to the state: a place that was forgotten fails here.

A row (`trainer/measurement/meter.py`) becomes a message's row, a metric window (`collector/window.py`) and a state
(`schemas/features.py`). Each test changes one value after the other and looks whether what is made of it changes.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import examples
from tests.support.job_options import job_options
from tests.support.rows import row

from dynamix.collector.window import Observation, metric_window
from dynamix.schemas.features import RANK_FEATURES, state_of, unpack_ranks
from dynamix.schemas.messages import (
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    NodeRanks,
    RankMetrics,
    RankRow,
    State,
    SystemMetrics,
    TrainingMetrics,
)
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.plan import Counts, Position
from dynamix.trainer.job.identity import Attempt, JobIdentity, Place
from dynamix.trainer.measurement.meter import Row, held_out_accuracy, job_totals
from dynamix.trainer.steering.run import Reporter

Metrics = TrainingMetrics | SystemMetrics | NetworkMetrics | NodeMetrics

FILLED_IN_BY_THE_FOLD = {"decided_local_batch_size", "age_windows"}
READ_BY_READINGS_AND_PROBES = {
    *("local_rank", "pid", "pid_start_ticks", "pid_namespace", "uid"),
    *("device_memory_bytes", "device_memory_total_bytes"),
    *("sockets", "sockets_before", "cookies"),
}
"""What the collector uses of a message's row, but not in `window`."""
NOT_IN_THE_STATE = {
    *((SystemMetrics, "memory_bytes"), (NodeMetrics, "tx_bytes")),
    *((NodeMetrics, "rx_bytes"), (NodeMetrics, "retransmits")),
}
"""What the state holds as a ratio, or of each rank."""


def _changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if value == 0.5 else value + 1
    if isinstance(value, tuple):
        return type(value)(*map(_changed, value)) if hasattr(value, "_fields") else tuple(map(_changed, value))
    return type(value)(**{name: _changed(getattr(value, name)) for name in type(value).__annotations__})


def _message_row(one: Row) -> RankRow:
    """The row of rank 1 in its node's report, one window after another row."""
    nodes, place = (NodeRanks(node="node-a", ranks=(0, 1)),), Place(1, 1, "node-a", (0, 1))
    reporter = Reporter(
        job_options(window_steps=1), JobIdentity("job", 0, Attempt("", 0, 0), nodes, (9, 9)), place, Allocation((8, 8))
    )
    totals = job_totals([one], window=0, num_steps=1, global_batch_size=64)
    for rows in ([row(), row()], [row(), one]):
        report = reporter.report(
            *(Position(), rows, totals),
            sizes=Counts((64, 64)),
            pending=Allocation((96, 96)),
            total_samples=None,
            num_reports_dropped=0,
            cookies={1: (7,)},
        )
    return report.rows[1]


def _window(row: RankRow) -> MetricWindow:
    report = examples.report(rows=(row,))
    return metric_window(report, Observation())


def _full(struct: type[Metrics]) -> Any:
    return struct(**{name: 8 + number for number, name in enumerate(struct.__struct_fields__)})


def _state(changed: Metrics) -> State:
    """The state in which one of the four groups of metrics is `changed`, and all is known."""
    parts = {type(changed): changed}
    training, system, network, node = (
        parts.get(struct, _full(struct)) for struct in (TrainingMetrics, SystemMetrics, NetworkMetrics, NodeMetrics)
    )
    ranks = (RankMetrics(rank=0, training=training, system=system, network=network),)
    window = examples.window(probe="ebpf")
    return state_of(msgspec.structs.replace(window, ranks=ranks, node_metrics=node))


# ranks compare the digest, and plan their windows by the wall time
@pytest.mark.parametrize("column", sorted({*Row.__struct_fields__} - {"rank", "data_digest", "wall_s"}))
def test_every_column_of_a_row_reaches_a_message(column: str) -> None:
    def messages(one: Row) -> Any:
        totals = job_totals([one], window=0, num_steps=1, global_batch_size=64)
        return totals, held_out_accuracy([one]), one.noise

    assert messages(row(**{column: _changed(getattr(row(), column))})) != messages(row()), column


def test_every_field_of_a_messages_row_is_filled_in() -> None:
    message = _message_row(row(rank=1, times_split=False))
    missing = [f.name for f in msgspec.structs.fields(RankRow) if getattr(message, f.name) == f.default]
    assert missing == [], "a report leaves these at their defaults"


@pytest.mark.parametrize("field", sorted(set(RankRow.__struct_fields__) - READ_BY_READINGS_AND_PROBES))
def test_every_measured_field_of_a_row_reaches_the_metric_window(field: str) -> None:
    known = msgspec.structs.replace(_message_row(row()), times_split=True)
    value = getattr(known, field)
    changed = not value if isinstance(value, bool) else value + 1
    assert _window(msgspec.structs.replace(known, **{field: changed})) != _window(known), field


def test_every_field_of_the_training_metrics_is_filled_in() -> None:
    training = _window(msgspec.structs.replace(_message_row(row()), times_split=True)).ranks[0].training
    assert [f.name for f in msgspec.structs.fields(TrainingMetrics) if getattr(training, f.name) == f.default] == []


@pytest.mark.parametrize(
    ("struct", "field"),
    [
        (struct, field)
        for struct in (TrainingMetrics, SystemMetrics, NetworkMetrics, NodeMetrics)
        for field in struct.__struct_fields__
        if (struct, field) not in NOT_IN_THE_STATE
    ],
)
def test_every_metric_is_a_feature(struct: type[Metrics], field: str) -> None:
    full = _full(struct)
    assert _state(msgspec.structs.replace(full, **{field: 100})) != _state(full), f"no feature holds {field}"


def test_every_feature_has_a_source() -> None:
    values = unpack_ranks(_state(_full(TrainingMetrics)))[0]
    unknown = {name for name, value in zip(RANK_FEATURES, values, strict=True) if np.isnan(value)}
    assert unknown == FILLED_IN_BY_THE_FOLD
