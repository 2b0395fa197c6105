"""Payloads by hypothesis: each is of a kind that a service reads, and none can be decoded."""

from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st
from tests.support import examples
from tests.support.control_plane import NODE, one_node_job, report_of

from dynamix.schemas import subjects
from dynamix.schemas.codec import HEADER_BYTES, MAX_MESSAGE_BYTES, encode
from dynamix.schemas.messages import Message

RANKS = (0, 1, 2, 3)
READERS = {"report": "collector", "window": "reward", "state": "arbitrator"}


class UndecodablePayload(NamedTuple):
    """One payload and the kind of its subject."""

    kind: str
    payload: bytes

    @property
    def subject(self) -> str:
        return subjects.of(self.kind, examples.JOB, NODE)


def valid(kind: str, window: int = 0) -> Message:
    """A valid message of the kind."""
    if kind == "report":
        return report_of(one_node_job(), window, (128,) * 4, (1000.0,) * 4)
    if kind == "window":
        return examples.window(NODE, RANKS, window)
    return examples.state(NODE, RANKS, window)


def undecodable_payloads() -> st.SearchStrategy[UndecodablePayload]:
    """Payloads with every kind of defect, for every reader."""
    kinds = st.sampled_from(sorted(READERS))
    return kinds.flatmap(lambda kind: _payloads(kind).map(lambda data: UndecodablePayload(kind, data)))


def _payloads(kind: str) -> st.SearchStrategy[bytes]:
    good = encode(valid(kind))
    header, body = good[:HEADER_BYTES], good[HEADER_BYTES:]
    fields = msgspec.msgpack.decode(body)
    return st.one_of(
        st.binary(max_size=300).filter(lambda data: data[:2] != b"DX"),
        st.binary(max_size=300).map(lambda data: header + b"\xc1" + data),  # 0xc1 is no msgpack
        st.integers(0, len(good) - 1).map(lambda end: good[:end]),
        st.integers(0, 255).filter(lambda b: b != good[2]).map(lambda b: good[:2] + bytes([b]) + good[3:]),
        st.integers(0, 255).filter(lambda b: b != good[3]).map(lambda b: good[:3] + bytes([b]) + good[4:]),
        st.integers(MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 400_000).map(lambda size: good + bytes(size)),
        st.integers(20, 100_000).map(lambda depth: header + b"\x91" * depth),
        st.sampled_from([2**53, 2**63, 2**64 - 1, -1, -(2**63)]).map(lambda n: header + _with(fields, 2, n)),
        st.sampled_from([None, 1.5, "7", [], {}, b"x"]).map(lambda value: header + _with(fields, 2, value)),
        st.sampled_from(_float_paths(fields)).flatmap(
            lambda path: st.sampled_from(["nan", "inf", "-inf"]).map(
                lambda name: header + _with_at(fields, path, float(name))
            )
        )
        if _float_paths(fields)
        else st.just(header + body[:-1]),
        st.sampled_from(["node-z", "", "a.b", "*", "x" * 64, "\x00"]).map(lambda name: header + _with(fields, 3, name)),
    )


def _with(fields: list[Any], index: int, value: Any) -> bytes:
    return msgspec.msgpack.encode([*fields[:index], value, *fields[index + 1 :]])


def _float_paths(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Paths to the floats in nested arrays."""
    if isinstance(value, float):
        return [path]
    if not isinstance(value, list):
        return []
    return [found for index, item in enumerate(value) for found in _float_paths(item, (*path, index))]


def _with_at(fields: Any, path: tuple[int, ...], value: float) -> bytes:
    def replaced(part: Any, rest: tuple[int, ...]) -> Any:
        if not rest:
            return value
        return [replaced(item, rest[1:]) if index == rest[0] else item for index, item in enumerate(part)]

    return msgspec.msgpack.encode(replaced(fields, path))
