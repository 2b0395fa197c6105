"""The wire format, held by bytes written down once: a change here breaks every running job and every capture."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.support import examples

from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode_any, encode
from dynamix.schemas.messages import Dead, Live, Message, PolicyVersion, RankReward, Summary
from dynamix.schemas.subjects import KINDS

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
