"""The wire format, held by bytes written down once: a change here breaks every running job and every capture."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.support import examples

from dynamix.schemas import subjects
from dynamix.schemas.chain import is_intact, seal
from dynamix.schemas.codec import decode_any, encode
from dynamix.schemas.kinds import KINDS
from dynamix.schemas.messages import Applied, Dead, Event, Live, Message, PolicyVersion, RankReward, Reward

HEAD_BYTES = 4
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_messages.json").read_text())

MESSAGES: dict[str, Message] = {
    "job": examples.job(),
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
    "reward": Reward(
        job=examples.JOB,
        generation=0,
        window=3,
        node="node-a",
        formula="paper-sgd",
        ranks=(RankReward(rank=0, reward=0.5, terms={"accuracy": 0.75, "iteration_time": -0.25}),),
    ),
    "action": seal(examples.action(5, carry=b"\x01\x02"), b"p" * 32),
    "applied": Applied(
        job=examples.JOB,
        generation=0,
        decided_window=3,
        effective_window=5,
        effective_step=50,
        local_batch_sizes=(1, 2),
        num_refused={"stale": 1},
    ),
    "trace": examples.trace(window=3),
    "profile": examples.profile(),
    "policy": PolicyVersion(policy="ppo", version=3, digest=b"d" * 32, content=b"file"),
    "dead": Dead(service="reward", subject="dynamix.v1.window.a.b", sequence=9, reason="why", payload=b"x"),
    "live": Live(service="reward", instance="node-a", uptime_s=1.5, counters={"rewards": 4}),
    "event": Event(
        job=examples.JOB,
        generation=0,
        window=9,
        signature="size-stuck",
        service="arbitrator",
        value=1.0,
        limit=0.9,
        explanation="why",
    ),
}


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_the_wire_bytes_are_the_golden_ones(kind: str) -> None:
    message = MESSAGES[kind]
    assert encode(message).hex() == GOLDEN[kind]
    subject = "dynamix.v1.dead.window.a._" if kind == "dead" else subjects.subject_of(message)
    assert decode_any(subject, bytes.fromhex(GOLDEN[kind])) == message


def test_an_action_is_bound_to_its_content_and_predecessor() -> None:
    sealed = seal(examples.action(5), b"p" * 32)
    assert is_intact(encode(sealed))
    assert not is_intact(encode(examples.action(5, hash=sealed.hash, previous_hash=b"q" * 32)))
    assert seal(examples.action(5), b"q" * 32).hash != sealed.hash


def test_an_action_without_a_profile_has_the_bytes_of_those_before_there_were_any() -> None:
    said, with_profile = (examples.action(5, reason="by speed", profile=each) for each in (b"", b"\x07"))
    assert len(encode(with_profile)) - len(encode(said)) == 3
    assert decode_any(subjects.subject_of(said), encode(with_profile)) == with_profile


def test_an_action_without_a_reason_has_the_bytes_of_those_before_there_were_any() -> None:
    plain, said = encode(examples.action(5)), encode(examples.action(5, reason="by speed"))
    assert len(said) - len(plain) == len(bytes.fromhex(EXACT_BYTES)) + 1 + len("by speed")
    assert b"by speed" in said
    assert decode_any(subjects.subject_of(examples.action(5)), said) == examples.action(5, reason="by speed")
    assert decode_any(subjects.subject_of(examples.action(5)), plain) == examples.action(5)


def test_messages_of_simple_jobs_have_the_bytes_of_those_before_energy_was_measured_and_windows_stretched() -> None:
    measured = {
        "job": msgspec.structs.replace(MESSAGES["job"], explores=("learning_rate",), objective="energy"),
        "report": msgspec.structs.replace(MESSAGES["report"], energy_j=12.5, stretch=4),
        "window": msgspec.structs.replace(MESSAGES["window"], energy_j=12.5, stretch=4),
        "profile": msgspec.structs.replace(MESSAGES["profile"], energy_arms=examples.profile().arms),
    }
    for kind, message in measured.items():
        fields = message.__struct_fields__
        num_newer = 2 if kind in ("report", "window") else 1
        assert len(msgspec.msgpack.decode(bytes.fromhex(GOLDEN[kind])[HEAD_BYTES:])) == len(fields) - num_newer, kind
        payload = encode(message)
        assert len(msgspec.msgpack.decode(payload[HEAD_BYTES:])) == len(fields)
        assert decode_any(subjects.subject_of(message), payload) == message


EXACT_BYTES = "9601a46e6f6e65aa616c6c2d72656475636590" + "cb3ff0000000000000" + "cb0000000000000000"
"""The bytes of an exchange, as newer messages have it at their end."""
WITHOUT_TABLES = "c2cb0000000000000000"
"""The bytes behind it in a job that can exchange gradients in no other way, and has no tables."""
NO_CODECS = "90"
"""The bytes behind those: the codecs of other packages that a job names, none."""
NO_FAMILY = "a090"
"""The bytes behind those in a job whose runs have nothing in common, and explore nothing."""


def test_messages_from_before_exchanges_were_decided_are_exact() -> None:
    old = GOLDEN["applied"].replace("44580107" + "99", "44580107" + "98").removesuffix(EXACT_BYTES)
    assert decode_any(subjects.subject_of(MESSAGES["applied"]), bytes.fromhex(old)) == MESSAGES["applied"]
    since = "a56578616374" + EXACT_BYTES + WITHOUT_TABLES + NO_CODECS + NO_FAMILY
    old = GOLDEN["job"].replace("44580101dc001c", "44580101dc0015").removesuffix(since)
    assert len(old) == len(GOLDEN["job"]) - len(since)
    assert decode_any(subjects.subject_of(MESSAGES["job"]), bytes.fromhex(old)) == MESSAGES["job"]


def test_messages_from_before_drift_and_learning_rates_were_measured_have_none() -> None:
    noise = "cb4059000000000000cb3fa999999999999a"
    old = GOLDEN["report"].replace("9c000acd1400", "98000acd1400").replace(noise + "c0c0c0c0", noise)
    assert len(old) == len(GOLDEN["report"]) - 16
    assert decode_any(subjects.subject_of(MESSAGES["report"]), bytes.fromhex(old)) == MESSAGES["report"]
    sigma = "cb4010000000000000"
    old = GOLDEN["window"].replace("dc0010cd0200cd1400", "9ccd0200cd1400").replace(sigma + "c0c0c0c0", sigma)
    assert len(old) == len(GOLDEN["window"]) - 12
    assert decode_any(subjects.subject_of(MESSAGES["window"]), bytes.fromhex(old)) == MESSAGES["window"]


def test_reports_from_before_there_were_agents_show_them_nothing() -> None:
    assert GOLDEN["report"].startswith("44580102dc0010")
    old = GOLDEN["report"].replace("44580102dc0010", "445801029f").removesuffix("c0")
    assert len(old) == len(GOLDEN["report"]) - 6
    assert decode_any(subjects.subject_of(MESSAGES["report"]), bytes.fromhex(old)) == MESSAGES["report"]


def test_messages_from_before_links_were_measured_know_none() -> None:
    for kind, place, inner in (("report", 8, None), ("window", 7, 1)):
        golden = bytes.fromhex(GOLDEN[kind])
        parts = msgspec.msgpack.decode(golden[HEAD_BYTES:])
        for row in parts[place]:
            fields = row if inner is None else row[inner]
            assert fields[-2:] == [None, None]
            del fields[-2:]
        old = golden[:HEAD_BYTES] + msgspec.msgpack.encode(parts)
        assert len(old) < len(golden)
        assert decode_any(subjects.subject_of(MESSAGES[kind]), old) == MESSAGES[kind]


def test_exchanges_from_before_outer_steps_end_rounds_with_the_mean() -> None:
    plain = "9401a46e6f6e65aa616c6c2d72656475636590"
    for kind in ("applied", "job"):
        old = bytes.fromhex(GOLDEN[kind].replace(EXACT_BYTES, plain))
        assert len(old) == len(GOLDEN[kind]) // 2 - 18
        assert decode_any(subjects.subject_of(MESSAGES[kind]), old) == MESSAGES[kind]


def test_a_job_from_before_the_field_global_batch_may_change_its_sum() -> None:
    since = "a86164617074697665" + "a56578616374" + EXACT_BYTES + WITHOUT_TABLES + NO_CODECS + NO_FAMILY
    old = bytes.fromhex(GOLDEN["job"].replace("44580101dc001c", "44580101dc0014").removesuffix(since))
    assert decode_any(subjects.subject_of(MESSAGES["job"]), old) == MESSAGES["job"]
