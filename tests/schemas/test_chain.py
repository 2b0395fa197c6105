"""The chain of actions: any change of any bit is seen, in any place of the chain."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import examples

from dynamix.schemas.chain import BrokenChainError, ChainCheck, is_intact, seal
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Action


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
