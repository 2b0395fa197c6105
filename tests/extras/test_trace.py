"""Spans of windows: one trace for each, from the times at which the broker stored its messages."""

from typing import Any

from tests.support import examples

from dynamix.extras.trace import KEPT_WINDOWS, WindowSpan, WindowTraces
from dynamix.recording.capture import Record
from dynamix.schemas import codec, subjects

MS = 1_000_000


def record(at_ms: int, message: Any) -> Record:
    return Record("FEED", at_ms, at_ms * MS, subjects.subject_of(message), "", codec.encode(message))


def one_window(window: int = 0, begin_ms: int = 1000) -> list[Record]:
    """Two nodes: b is slower."""
    return [
        record(begin_ms + 0, examples.report("node-a", (0, 1), window)),
        record(begin_ms + 1, examples.window("node-a", (0, 1), window)),
        record(begin_ms + 2, examples.state("node-a", (0, 1), window)),
        record(begin_ms + 3, examples.reward("node-a", (0, 1), window)),
        record(begin_ms + 10, examples.report("node-b", (2, 3), window)),
        record(begin_ms + 11, examples.window("node-b", (2, 3), window)),
        record(begin_ms + 12, examples.state("node-b", (2, 3), window)),
        record(begin_ms + 20, examples.action(window)),
        record(begin_ms + 90, examples.applied(window, window + 2)),
    ]


def fold(found: list[Record]) -> list[WindowSpan]:
    traces = WindowTraces(examples.JOB)
    return [span for one in found for span in traces.add_record(one)] + traces.finish()


def test_report_window_action_and_receipt_are_one_trace() -> None:
    spans = {span.name: span for span in fold(one_window())}
    assert {name: (span.start_ns // MS, span.end_ns // MS) for name, span in spans.items()} == {
        "window": (1000, 1090),
        "collect node-a": (1000, 1002),
        "reward node-a": (1001, 1003),
        "collect node-b": (1010, 1012),
        "decide": (1012, 1020),
        "adopt": (1020, 1090),
    }
    root = spans["window"]
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    assert root.parent_id is None
    parents = {name: span.parent_id for name, span in spans.items() if name != "window"}
    assert parents.pop("reward node-a") == spans["collect node-a"].span_id
    assert set(parents.values()) == {root.span_id}
    assert len({span.span_id for span in spans.values()}) == len(spans)


def test_spans_have_their_window_and_what_was_decided() -> None:
    spans = {span.name: span.attributes for span in fold(one_window(7))}
    of_window = {"dynamix.job": examples.JOB, "dynamix.generation": 0, "dynamix.window": 7}
    assert spans["window"] == of_window | {"dynamix.decided": True, "dynamix.applied": True, "dynamix.nodes": 2}
    assert spans["collect node-a"]["dynamix.probe"] == "tcp_info"
    assert spans["decide"]["dynamix.policy"] == "static"
    assert spans["decide"]["dynamix.local_batch_sizes"] == [128, 128, 128, 128]
    assert (spans["adopt"]["dynamix.effective_window"], spans["adopt"]["dynamix.effective_step"]) == (9, 90)


def test_ids_are_the_same_wherever_and_whenever_they_are_derived() -> None:
    first, again = fold(one_window()), fold([*one_window(), *one_window()])  # a second delivery of every message
    assert [(span.trace_id, span.span_id) for span in first] == [(span.trace_id, span.span_id) for span in again]
    other = fold(one_window(1))
    assert {span.trace_id for span in other}.isdisjoint({span.trace_id for span in first})
    assert f"{first[0].trace_id:032x}" == "131485cf1ae783fa6a821384c3fe2cd1"  # of mnist-0a1b2c3d:0:0


def test_a_window_is_sent_once_later_ones_can_no_longer_change_it() -> None:
    traces = WindowTraces(examples.JOB)
    found: list[tuple[int, WindowSpan]] = []
    for window in range(KEPT_WINDOWS + 1):
        for one in one_window(window, 1000 * (window + 1)):
            found += [(window, span) for span in traces.add_record(one)]
    assert {(window, span.attributes["dynamix.window"]) for window, span in found} == {(KEPT_WINDOWS, 0)}
    assert len({span.trace_id for span in traces.finish()}) == KEPT_WINDOWS
