"""The codec `rows`: touched rows travel, nothing else of a table, and the sum is the dense one bit for bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, same_bits

from dynamix.trainer.exchange.codec import BucketView, Member
from dynamix.trainer.exchange.collectives import Collective, Sum, Union
from dynamix.trainer.exchange.rows import LOOK_AGAIN, RowsExchange
from dynamix.trainer.exchange.sparse.bitmap import (
    pack_bits,
    pack_on_device,
    positions,
    touched_rows,
    unpack_bits,
    unpack_on_device,
)

SHAPES = {"bias": (7,), "table": (1000, 6), "norm": (3,), "wide": (40, 5, 5), "tail": (11,)}
LENGTH = 7 + 6000 + 3 + 1000 + 11


def sparse(
    num_ranks: int, seed: int, *, dtype: torch.dtype = torch.float32, dense_wide: bool = False
) -> list[torch.Tensor]:
    """Gradients by rank with 5 % of the rows of each table, all of the others; in one place -0.0."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_ranks):
        gradient = torch.randn(LENGTH, generator=generator)
        table, wide = gradient[7:6007].view(1000, 6), gradient[6010:7010].view(40, 25)
        table[torch.rand(1000, generator=generator) > 0.05] = 0
        if not dense_wide:
            wide[torch.rand(40, generator=generator) > 0.05] = 0
        gradient[7 + 6 * 500] = -0.0
        found.append(gradient.to(dtype))
    return found


def asked_by(codec: RowsExchange, gradient: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> list[Collective]:
    """What one of two ranks asks for, its gradient alone being touched."""
    return list(codec.reduce(BucketView(0, gradient, make_parts(shapes)), Member(0, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shares", [(), (1, 0, 2)])
def test_the_sum_is_the_dense_one_bit_for_bit(shares: tuple[float, ...], dtype: torch.dtype) -> None:
    ranks, plain = VirtualRanks("rows", 3, shares), VirtualRanks("none", 3, shares)
    for step in range(5):
        gradients = sparse(3, step, dtype=dtype, dense_wide=step % 2 == 0)
        assert same_bits(ranks.reduce(gradients, SHAPES), plain.reduce(gradients, SHAPES))


def test_only_touched_rows_travel_and_one_bit_for_every_row() -> None:
    gradient = torch.zeros(8000)
    gradient[8 * 3 : 8 * 5] = 1.0
    gradient[8 * 999 + 7] = -0.0
    union, rows = asked_by(RowsExchange(), gradient, {"table": (1000, 8)})
    assert isinstance(union, Union)
    assert isinstance(rows, Sum)
    assert (len(union.tensor), len(rows.tensor)) == (1 + 125, 24)
    assert positions(unpack_bits(union.tensor[1:], 1000)).tolist() == [3, 4, 999]


def test_what_no_rank_touched_does_not_travel_at_all() -> None:
    (union,) = asked_by(RowsExchange(), torch.zeros(8000), {"table": (1000, 8)})
    assert isinstance(union, Union)


def test_a_parameter_that_is_dense_is_left_alone_for_50_steps() -> None:
    codec, shapes = RowsExchange(), {"table": (100, 8), "dense": (10, 10)}
    gradient = torch.zeros(900)
    gradient[800:880] = 1.0
    kinds = []
    for _ in range(2 * LOOK_AGAIN + 3):
        first, *others = asked_by(codec, gradient, shapes)
        assert isinstance(first, Union)
        kinds.append((len(first.tensor), [len(each.tensor) for each in others if isinstance(each, Sum)]))
    looked, alone = (1 + 14, [100]), (1 + 13, [100])
    assert LOOK_AGAIN == 50
    assert kinds == [looked, *[alone] * 50, looked, *[alone] * 50, looked]


def test_a_model_that_is_dense_sends_buckets_as_they_are() -> None:
    codec, gradient = RowsExchange(), torch.ones(100)
    first = asked_by(codec, gradient, {"dense": (10, 10)})
    assert [type(each) for each in first] == [Union, Sum]
    for _ in range(LOOK_AGAIN):
        (only,) = asked_by(codec, gradient, {"dense": (10, 10)})
        assert isinstance(only, Sum)
        assert only.tensor.data_ptr() == gradient.data_ptr(), "nothing is copied"
    assert [type(each) for each in asked_by(codec, gradient, {"dense": (10, 10)})] == [Union, Sum]


def test_a_parameter_that_became_sparse_travels_by_rows_again() -> None:
    ranks = VirtualRanks("rows", 2)
    shapes = {"table": (100, 8)}
    ones, few = torch.ones(800), torch.zeros(800)
    few[:8] = 3.0
    for step in range(LOOK_AGAIN + 5):
        gradients = [ones if step == 0 else few, few]
        assert same_bits(ranks.reduce(gradients, shapes), dense_sum(gradients))
    assert [len(each.tensor) for each in asked_by(ranks.codecs[0], few.clone(), shapes)] == [1 + 13, 8]  # type: ignore[union-attr, arg-type]


def test_a_parameter_is_left_alone_in_whichever_bucket_it_is() -> None:
    codec = RowsExchange()
    asked_by(codec, torch.ones(180), {"one": (10, 10), "other": (10, 8)})
    assert [type(each) for each in asked_by(codec, torch.ones(80), {"other": (10, 8)})] == [Sum]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_travels(bad: float) -> None:
    gradients = sparse(3, 1)
    row = 7 + 6 * 77
    for gradient in gradients:
        gradient[row : row + 6] = 0
    gradients[2][row] = bad
    summed = VirtualRanks("rows", 3).reduce(gradients, SHAPES)
    assert torch.equal(summed.isfinite(), dense_sum(gradients).isfinite())
    assert torch.allclose(summed, dense_sum(gradients), rtol=0, atol=0, equal_nan=True)


def test_minus_zero_on_all_ranks_stays_minus_zero() -> None:
    gradients = [torch.zeros(80) for _ in range(3)]
    for gradient in gradients:
        gradient[42] = -0.0
    summed = VirtualRanks("rows", 3).reduce(gradients, {"table": (10, 8)})
    assert torch.signbit(summed).nonzero().flatten().tolist() == [42]


@pytest.mark.parametrize("num_with", [0, 1, 2, 3])
@pytest.mark.parametrize("shapes", [SHAPES, {"wide": (LENGTH - 27, 1), "tail": (27,)}])
def test_gradients_multiplied_by_a_mask_travel_by_rows_and_keep_their_zeros_signs(
    shapes: dict[str, tuple[int, ...]], num_with: int
) -> None:
    gradients = [each * -1 + (0.0 if rank >= num_with else -0.0) for rank, each in enumerate(sparse(3, 1))]
    ranks = VirtualRanks("rows", 3)
    for _ in range(2):
        assert same_bits(ranks.reduce(gradients, shapes), dense_sum(gradients))
    leg = ranks.codecs[0].reduce(BucketView(0, gradients[0].clone(), make_parts(shapes)), Member(0, 3))
    assert 2 <= len(list(leg)) <= 3, "nothing was left alone"


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 200),
    width=st.integers(1, 9),
    offset=st.integers(0, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    touched=st.sets(st.integers(0, 199)),
)
def test_bitmaps_tell_touched_rows_for_any_width(
    num_rows: int, width: int, offset: int, dtype: torch.dtype, touched: set[int]
) -> None:
    rows = sorted(each for each in touched if each < num_rows)
    whole = torch.ones(offset + num_rows * width, dtype=dtype)
    gradient = whole[offset:]
    gradient.zero_()
    for index, row in enumerate(rows):
        gradient[row * width + row % width] = (-0.0, 1e-40, -1.0, math.nan)[index % 4] if dtype.itemsize > 2 else -0.0
    mask = touched_rows(gradient, num_rows)
    assert positions(mask).tolist() == rows
    packed = pack_bits(mask)
    assert len(packed) == -(-num_rows // 8)
    assert torch.equal(unpack_bits(packed, num_rows), mask)
    assert torch.equal(pack_on_device(mask), packed)
    assert torch.equal(unpack_on_device(packed, num_rows), mask)
