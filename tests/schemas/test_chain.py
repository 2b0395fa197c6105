"""The chain of actions: any change of any bit is seen, in any place of the chain."""

import itertools

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


def with_bit_flipped(bit: int) -> bytes:
    flipped = bytearray(PAYLOAD)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def test_a_payload_with_any_one_bit_the_other_way_is_not_intact() -> None:
    assert is_intact(PAYLOAD)
    assert [bit for bit in range(len(PAYLOAD) * 8) if is_intact(with_bit_flipped(bit))] == []


@given(st.binary(max_size=64), st.integers(0, len(PAYLOAD)))
def test_what_is_no_action_or_cut_or_longer_is_not_intact(extra: bytes, cut: int) -> None:
    assert not is_intact(extra)
    if extra:
        assert not is_intact(PAYLOAD + extra)
    if cut < len(PAYLOAD):
        assert not is_intact(PAYLOAD[:cut])


def test_a_chain_is_whole_over_gaps_and_generations() -> None:
    assert check(chain((0, 0), (0, 1), (0, 7), (2, 0), (2, 1))) == 5


def test_the_oldest_that_is_kept_may_follow_anything() -> None:
    assert check(chain((0, 0), (0, 1), (0, 2))[1:]) == 2


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_action_breaks_it(missing: int) -> None:
    actions = chain(*((0, window) for window in range(5)))
    with pytest.raises(BrokenChainError, match=f"the action for window {missing + 1} of .* does not follow"):
        check([*actions[:missing], *actions[missing + 1 :]])


def test_an_action_of_other_content_breaks_it() -> None:
    first, second = chain((0, 0), (0, 1))
    with pytest.raises(BrokenChainError, match="window 1 of generation 0 is not as it was written"):
        check([first, msgspec.structs.replace(second, watermark=9)])


@pytest.mark.parametrize("places", list(itertools.combinations([(0, 0), (0, 3), (1, 0)], 2)))
def test_an_action_for_what_was_decided_before_breaks_it(places: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(BrokenChainError, match="stands behind the one for"):
        check(chain(*reversed(places)))
    with pytest.raises(BrokenChainError, match="stands behind the one for"):
        check(chain(places[0], places[0]))
