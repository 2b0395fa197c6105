"""Messages on the wire: encoding, golden bytes, the chain of actions."""

import json
import math
import random
import string
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples

from dynamix.schemas import codec, subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck, is_intact, seal
from dynamix.schemas.codec import MalformedMessageError, decode, decode_any, encode
from dynamix.schemas.messages import Action, Dead, Live, Message, PolicyVersion, RankReward, Report, Summary
from dynamix.schemas.subjects import KINDS


@pytest.mark.parametrize(
    ("kind", "tokens", "payload", "reason"),
    [
        ("report", ("node-b",), encode(examples.report("node-a")), r"identity mnist-0a1b2c3d\.node-a"),
        ("job", (), encode(examples.action()), "kind 6 is not job"),
        ("action", (), b"DX\x09" + encode(examples.action())[3:], "version 9"),
    ],
)
def test_a_payload_that_its_subject_contradicts_or_of_a_later_version_is_refused(
    kind: str, tokens: tuple[str, ...], payload: bytes, reason: str
) -> None:
    with pytest.raises(MalformedMessageError, match=reason):
        decode_any(subjects.of(kind, examples.JOB, *tokens), payload)


def test_a_message_of_another_type_than_expected_is_refused() -> None:
    action = examples.action()
    with pytest.raises(MalformedMessageError, match="carries a Action, not a Report"):
        decode(Report, subjects.subject_of(action), encode(action))


def test_a_message_over_the_limit_is_refused_on_both_sides() -> None:
    huge = examples.action(policy="p", logprobs=(0.0,) * 70_000)
    with pytest.raises(MalformedMessageError, match="is over 524288"):
        encode(huge)
    with pytest.raises(MalformedMessageError, match="over the limit"):
        decode_any(subjects.of("action", examples.JOB), b"DX" + bytes(codec.MAX_MESSAGE_BYTES))


def test_a_job_of_10_000_ranks_is_specified_within_the_limit_of_a_trainers_message() -> None:
    """Eight ranks to a node, long names, and sizes as after a restart."""
    draw = random.Random(0)
    names = ["x" * 54 + "-" + "".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(1250)]
    nodes = {name: tuple(range(8 * place, 8 * place + 8)) for place, name in enumerate(names)}
    job = examples.job(nodes, initial_local_batch_sizes=tuple(draw.randint(32, 1024) for _ in range(10_000)))
    data = encode(job)
    assert len(data) <= codec.MAX_TRAINER_BYTES < len(msgspec.msgpack.encode(job))
    assert decode_any(subjects.subject_of(job), data) == job


def test_equal_sizes_of_many_ranks_inflate_as_little_as_others() -> None:
    receipt = examples.applied(1, 2, local_batch_sizes=(1024,) * 40_000)
    assert decode_any(subjects.subject_of(receipt), encode(receipt)) == receipt


@pytest.mark.parametrize("body", [bytes(300_000), bytes(200_000), random.Random(0).randbytes(280_000)])
def test_what_inflates_beyond_the_limits_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="over the limit"):
        decode_any(subjects.of("job", examples.JOB), b"DX\x01\x81" + zlib.compress(body))
    with pytest.raises(MalformedMessageError, match="not by zlib"):
        decode_any(subjects.of("job", examples.JOB), b"DX\x01\x81" + encode(examples.job()))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_with_the_codecs_own_error(data: bytes) -> None:
    for payload in (data, b"DX\x01\x06" + data):
        try:
            decode_any(subjects.of("action", examples.JOB), payload)
        except MalformedMessageError:
            continue
        pytest.fail("random bytes were taken for an action")


@given(st.integers(min_value=0, max_value=200))
def test_a_truncated_message_is_refused(length: int) -> None:
    data = encode(examples.report())
    with pytest.raises(MalformedMessageError):
        decode_any(subjects.of("report", examples.JOB, "node-a"), data[: min(length, len(data) - 1)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"initial_local_batch_sizes": (128,) * 3}, "must hold 4 sizes"),
        ({"max_local_batch_sizes": (1024, 16, 1024, 1024)}, "leaves no size to choose"),
        ({"world_size": 5}, "each rank 0"),
    ],
)
def test_a_contradictory_specification_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        examples.job(**changes)


@given(st.lists(st.floats(width=32) | st.floats(), min_size=1, max_size=6), st.binary(max_size=40))
def test_a_non_finite_float_is_refused_beside_any_other_content(values: list[float], carry: bytes) -> None:
    message = examples.action(logprobs=tuple(values), carry=carry)
    if all(math.isfinite(value) for value in values):
        assert decode_any(subjects.of("action", examples.JOB), encode(message)) == message
    else:
        with pytest.raises(MalformedMessageError, match="not finite"):
            encode(message)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [">f", ">d"])
def test_a_foreign_float_of_either_width_is_refused_when_it_is_not_finite(form: str, value: float) -> None:
    good = encode(examples.action(logprobs=(0.125,)))
    packed = (b"\xca" if form == ">f" else b"\xcb") + struct.pack(form, value)
    foreign = good.replace(b"\xcb" + struct.pack(">d", 0.125), packed)
    assert foreign != good
    with pytest.raises(MalformedMessageError, match=r"logprobs\[0\]"):
        decode_any(subjects.of("action", examples.JOB), foreign)
    bad = examples.report(rows=(examples.row(0), examples.row(1, loss_sum=value)))
    with pytest.raises(MalformedMessageError, match=r"rows\[1\]\.loss_sum"):
        encode(bad)


# --- golden bytes: a change here breaks every running job and every capture ---

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_messages.json").read_text())

MESSAGES: dict[str, Message] = {
    "job": msgspec.structs.replace(
        examples.job(),
        summary=Summary(num_steps=8, num_samples=96, time_s=2.0, own_s=0.125, equal_sizes_s=3.0, script_batch_s=4.0),
    ),
    "report": examples.report(
        rows=(
            examples.row(
                0, sockets=examples.sockets(5, 6, 1), sockets_before=examples.sockets(1, 2), accuracy_before=0.5
            ),
            examples.row(1),
        ),
        totals_before=examples.totals(),
    ),
    "window": examples.window(),
    "state": examples.state(),
    "reward": msgspec.structs.replace(
        examples.reward("node-a", (0,), 3),
        ranks=(RankReward(rank=0, reward=0.5, terms={"accuracy": 0.75, "iteration_time": -0.25}),),
    ),
    "action": seal(examples.action(5, carry=b"\x01\x02"), b"p" * 32),
    "applied": examples.applied(3, 5, local_batch_sizes=(1, 2), num_refused={"stale": 1}),
    "trace": examples.trace(window=3),
    "profile": examples.profile(),
    "policy": PolicyVersion(policy="ppo", version=3, digest=b"d" * 32, content=b"file"),
    "dead": Dead(service="reward", subject="dynamix.v1.window.a.b", sequence=9, reason="why", payload=b"x"),
    "live": Live(service="reward", instance="node-a", uptime_s=1.5, counters={"rewards": 4}),
    "event": examples.event(9, value=1.0, limit=0.9, explanation="why"),
}


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_the_wire_bytes_are_the_golden_ones(kind: str) -> None:
    message = MESSAGES[kind]
    assert encode(message).hex() == GOLDEN[kind]
    subject = "dynamix.v1.dead.window.a._" if kind == "dead" else subjects.subject_of(message)
    assert decode_any(subject, bytes.fromhex(GOLDEN[kind])) == message


# --- the chain of actions: any change of any bit is seen ---


def chain(*places: tuple[int, int]) -> list[Action]:
    """Actions for these generations and windows."""
    found: list[Action] = []
    for generation, window in places:
        action = examples.action(window, generation=generation, carry=b"\x00\x80", logprobs=(-0.5,))
        found.append(seal(action, found[-1].hash if found else b""))
    return found


(SEALED,) = chain((0, 5))
PAYLOAD = encode(SEALED)


def check(actions: list[Action]) -> int:
    taken = ChainCheck()
    for action in actions:
        taken.check_next(action, encode(action))
    return taken.num_actions


def test_a_payload_with_any_one_bit_the_other_way_is_not_intact() -> None:
    assert is_intact(PAYLOAD)
    for bit in range(len(PAYLOAD) * 8):
        flipped = bytearray(PAYLOAD)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not is_intact(bytes(flipped)), bit


@given(st.binary(max_size=64), st.integers(0, len(PAYLOAD)))
def test_what_is_no_action_or_cut_or_longer_is_not_intact(extra: bytes, cut: int) -> None:
    assert not is_intact(extra)
    if extra:
        assert not is_intact(PAYLOAD + extra)
    if cut < len(PAYLOAD):
        assert not is_intact(PAYLOAD[:cut])


def test_a_chain_is_whole_over_gaps_and_generations_and_the_oldest_action_may_follow_anything() -> None:
    actions = chain((0, 0), (0, 1), (0, 7), (2, 0), (2, 1))
    assert [check(actions), check(actions[1:])] == [5, 4]


def test_missing_changed_and_repeated_actions_break_the_chain() -> None:
    first, second, third = chain((0, 0), (0, 1), (1, 0))
    for actions, reason in (
        ([first, third], "window 0 of generation 1 does not follow"),
        ([first, msgspec.structs.replace(second, watermark=9)], "window 1 of generation 0 is not as it was written"),
        ([first, second, first], "window 0 of generation 0 stands behind"),
        ([first, second, second], "window 1 of generation 0 stands behind"),
    ):
        with pytest.raises(BrokenChainError, match=reason):
            check(actions)
