"""What an allocation goes through, from policy to checkpoint: a new lever that is forgotten somewhere fails here."""

from typing import Any

import msgspec
from tests.support import examples
from tests.support.ranks import run_ranks

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.policy import Array32, Decision
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation, Exchange
from dynamix.trainer.steering.collectives import Collectives

EVERY_LEVER = Allocation(
    (24, 40),
    "tracking",
    Exchange(every=4, codec="bf16", route="shares", shares=(0.25, 0.75), outer_rate=0.7, outer_momentum=0.9),
    0.5,
)
"""Another value than the default in every field."""


def test_no_field_of_the_example_has_its_default() -> None:
    for struct in (EVERY_LEVER, EVERY_LEVER.exchange):
        for field in msgspec.structs.fields(struct):
            assert getattr(struct, field.name) != field.default, f"give {field.name} another value in EVERY_LEVER"


class _EveryLever:
    name = "every-lever"
    version = 1

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        return Decision(EVERY_LEVER)


def test_an_arbitrator_writes_every_lever_of_a_decision_into_its_action() -> None:
    fold = Fold(examples.job({"node-a": (0, 1)}, min_local_batch_size=8), _EveryLever(), None)
    fold.add_state(1, examples.state())
    action = fold.close()
    assert action is not None
    assert action.allocation == EVERY_LEVER


def _broadcast(rank: int) -> list[Any]:
    collectives = Collectives()
    received = []
    for sent in (EVERY_LEVER, None, Allocation((1, 1))):
        collectives.post_decision(sent if rank == 0 else None)
        received.append(collectives.take_decision())
    return received


def test_every_lever_reaches_all_ranks() -> None:
    expected = [EVERY_LEVER, None, Allocation((1, 1))]
    assert run_ranks(_broadcast, 2) == [expected] * 2
