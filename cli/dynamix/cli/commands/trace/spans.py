"""From a job's stored messages to spans, one trace per window. Pure: all times are the broker's, when it stored them.

window                       first report stored ... the action applied, or the last thing that happened
  collect NODE               a node's report stored ... its state stored
    reward NODE              its metric window stored ... its rewards stored
  decide                     the last state before the action stored ... the action stored
  adopt                      the action stored ... its receipt stored: all ranks have agreed on the step

Ids are derived from job, generation, window and name. So no message has to carry any, no process of a job knows of
traces, and a capture gives the same trace as the job did while it ran.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamix.recording.capture import Record
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Action, Applied, Message, MetricWindow, Report, Reward, State

KEPT_WINDOWS = 8
"""A window is closed when this many later ones have begun: a trainer refuses actions that are older."""

AttributeValue = str | int | float | bool | list[int]


class WindowSpan(NamedTuple):
    """One span: ids as integers, times in ns since the epoch."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


@dataclass
class _NodeTimes:
    report_ns: int | None = None
    window_ns: int | None = None
    state_ns: int | None = None
    reward_ns: int | None = None
    attributes: dict[str, AttributeValue] = field(default_factory=dict)


@dataclass
class _WindowTimes:
    generation: int
    window: int
    nodes: dict[str, _NodeTimes] = field(default_factory=dict)
    action: Action | None = None
    action_ns: int = 0
    applied: Applied | None = None
    applied_ns: int = 0


class WindowTraces:
    """Folds the records of one job, in the order in which they were stored, into the spans of its windows."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._windows: dict[tuple[int, int], _WindowTimes] = {}
        self.num_malformed = 0

    def add_record(self, record: Record) -> list[WindowSpan]:
        """The spans of the windows that are complete by this record."""
        try:
            message = decode_any(record.subject, record.payload)
        except MalformedMessageError:
            self.num_malformed += 1
            return []
        if getattr(message, "job", None) != self._job:
            return []
        return self._add(message, record.timestamp_ns)

    def finish(self) -> list[WindowSpan]:
        """The spans of all windows that are left."""
        return [span for key in sorted(self._windows) for span in self._close(key)]

    def _add(self, message: Message, at_ns: int) -> list[WindowSpan]:
        match message:
            case Report():
                known = self._of(message.generation, message.window)
                self._node(known, message.node).report_ns = at_ns
                return self._overtaken(known)
            case MetricWindow():
                node = self._node(self._of(message.generation, message.window), message.node)
                node.window_ns, node.attributes = at_ns, {"dynamix.probe": message.probe}
            case State():
                self._node(self._of(message.generation, message.window), message.node).state_ns = at_ns
            case Reward():
                self._node(self._of(message.generation, message.window), message.node).reward_ns = at_ns
            case Action():
                known = self._of(message.generation, message.window)
                known.action, known.action_ns = message, at_ns
            case Applied():
                known = self._of(message.generation, message.decided_window)
                known.applied, known.applied_ns = message, at_ns
        return []

    def _of(self, generation: int, window: int) -> _WindowTimes:
        return self._windows.setdefault((generation, window), _WindowTimes(generation, window))

    def _node(self, known: _WindowTimes, node: str) -> _NodeTimes:
        return known.nodes.setdefault(node, _NodeTimes())

    def _overtaken(self, newest: _WindowTimes) -> list[WindowSpan]:
        oldest = (newest.generation, newest.window - KEPT_WINDOWS)
        return [span for key in sorted(self._windows) if key <= oldest for span in self._close(key)]

    def _close(self, key: tuple[int, int]) -> list[WindowSpan]:
        return list(spans_of(self._job, self._windows.pop(key)))


def spans_of(job: str, known: _WindowTimes) -> Iterator[WindowSpan]:
    """The spans of one window, the root first; none where no report of it is known."""
    reports = [node.report_ns for node in known.nodes.values() if node.report_ns is not None]
    if not reports:
        return
    trace = f"{job}:{known.generation}:{known.window}"
    trace_id, root_id = _id(trace, 16), _id(f"{trace}:window", 8)

    def span(name: str, start_ns: int, end_ns: int, parent_id: int | None, **more: AttributeValue) -> WindowSpan:
        attributes = {
            "dynamix.job": job,
            "dynamix.generation": known.generation,
            "dynamix.window": known.window,
            **{f"dynamix.{key}": value for key, value in more.items()},
        }
        span_id = _id(f"{trace}:{name}", 8)
        return WindowSpan(name, trace_id, span_id, parent_id, start_ns, max(start_ns, end_ns), attributes)

    times = [at for node in known.nodes.values() for at in (node.report_ns, node.state_ns, node.reward_ns)]
    last_ns = max([known.action_ns, known.applied_ns, *(at for at in times if at is not None)])
    decided, applied = known.action is not None, known.applied is not None
    yield span("window", min(reports), last_ns, None, decided=decided, applied=applied, nodes=len(known.nodes))
    for name, node in sorted(known.nodes.items()):
        yield from _node_spans(span, name, node, root_id)
    if known.action is not None:
        action = known.action
        states = [node.state_ns for node in known.nodes.values() if node.state_ns is not None]
        start_ns = max((at for at in states if at <= known.action_ns), default=known.action_ns)
        more: dict[str, AttributeValue] = {"policy": action.policy, "policy_version": action.policy_version}
        sizes = list(action.local_batch_sizes[:64])
        yield span("decide", start_ns, known.action_ns, root_id, local_batch_sizes=sizes, split=action.split, **more)
    if known.applied is not None and known.action is not None:
        receipt = known.applied
        effective = {"effective_window": receipt.effective_window, "effective_step": receipt.effective_step}
        yield span("adopt", known.action_ns, known.applied_ns, root_id, **effective)


def _node_spans(span: Callable[..., WindowSpan], name: str, node: _NodeTimes, root_id: int) -> Iterator[WindowSpan]:
    if node.report_ns is None or node.state_ns is None:
        return
    collect = span(f"collect {name}", node.report_ns, node.state_ns, root_id, node=name)
    yield collect._replace(attributes={**collect.attributes, **node.attributes})
    if node.window_ns is not None and node.reward_ns is not None:
        yield span(f"reward {name}", node.window_ns, node.reward_ns, collect.span_id, node=name)


def _id(text: str, num_bytes: int) -> int:
    """An id that is the same wherever it is derived; never 0, which means none."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes]) or 1
