"""The codec `sketch`: values of the touched elements in a table that owners only add, and no bit is lost."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, masked, same_bits

from dynamix.trainer.exchange.codec import BucketView, Member
from dynamix.trainer.exchange.collectives import Collective, Leg, Trade, Union, perform_alike
from dynamix.trainer.exchange.sketch import LOOK_AGAIN, SketchExchange
from dynamix.trainer.exchange.sparse.background_call import BackgroundCall
from dynamix.trainer.exchange.sparse.cells import pack_cells, packed_bytes, unpack_cells
from dynamix.trainer.exchange.sparse.exception_list import ExceptionList
from dynamix.trainer.exchange.sparse.fixed_point import (
    EXCEPTIONS,
    NOTHING,
    Span,
    find_span,
    from_fixed,
    read_span,
    span_bits,
    to_fixed,
    width_of_sums,
)
from dynamix.trainer.exchange.sparse.heads import HEAD_BYTES, Head
from dynamix.trainer.exchange.sparse.peeling import NUM_SEEDS, HashedElements, Peeling, hashed_elements

LENGTH = 8000


def exact_sum(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The true sums, rounded once to the type of the gradients."""
    columns = zip(*[each.double().tolist() for each in gradients], strict=True)
    return torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).to(gradients[0].dtype)


def kinds_of_step(ranks: VirtualRanks, gradients: list[torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """What rank 0 asks for in a step, and the sum."""
    asked: list[Collective] = []

    def watched(leg: Leg) -> Leg:
        for each in leg:
            asked.append(each)
            yield each

    first = ranks.codecs[0]
    reduce = first.reduce
    first.reduce = lambda bucket, member: watched(reduce(bucket, member))  # type: ignore[method-assign]
    summed = ranks.reduce(gradients)
    del first.reduce
    return [f"{type(each).__name__}" for each in asked], summed


@pytest.mark.parametrize("shares", [(), (0, 2, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_is_the_true_one_rounded_once(dtype: torch.dtype, shares: tuple[float, ...]) -> None:
    ranks = VirtualRanks("sketch", 4, shares)
    for step in range(4):
        gradients = [each.to(dtype) for each in masked(4, LENGTH, 0.05, step, alike=step % 2 == 0)]
        kinds, summed = kinds_of_step(ranks, gradients)
        assert kinds == ["Union", "Trade", "Trade"]
        assert torch.equal(summed, exact_sum(gradients))


@pytest.mark.parametrize("spread", [1, 1e-3, 1e-6])
@pytest.mark.parametrize("num_touched", range(1920, 2080, 16))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cells_lie_where_their_type_may_begin_whatever_is_beside_them(
    dtype: torch.dtype, num_touched: int, spread: float
) -> None:
    gradients = masked(3, 40 * num_touched, 1 / 40, 1, alike=True)
    for rank, gradient in enumerate(gradients):
        gradient[gradient.nonzero().flatten()[rank::2]] *= spread
    gradients = [(math.pi * each.double()).to(dtype) for each in gradients]  # with all bits of float64
    difference = VirtualRanks("sketch", 3).reduce(gradients).double() - exact_sum(gradients).double()
    rounding = 0.0 if dtype != torch.float64 else 1e-14  # sums of more bits than a cell has are the all-reduce's
    assert float(difference.abs().max()) <= rounding


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("lowest", [1e-6, 1e-15, 1e-36])
def test_small_values_travel_beside_the_table_and_nothing_is_lost(lowest: float, num_ranks: int) -> None:
    gradients = masked(num_ranks, LENGTH, 0.04, num_ranks)
    for rank, gradient in enumerate(gradients):
        gradient[gradient.nonzero().flatten()[rank::200]] *= lowest
    kinds, summed = kinds_of_step(VirtualRanks("sketch", num_ranks), gradients)
    assert kinds == ["Union", "Trade", "Trade"]
    assert torch.equal(summed, exact_sum(gradients))


@pytest.mark.parametrize("factor", [1e-6, 1e-9])
def test_values_of_two_scales_take_wider_cells(factor: float) -> None:
    gradients = masked(3, LENGTH, 0.02, 5)
    for gradient in gradients:
        gradient[::3] *= factor
    kinds, summed = kinds_of_step(VirtualRanks("sketch", 3), gradients)
    assert kinds == ["Union", "Trade", "Trade"]
    assert torch.equal(summed, exact_sum(gradients))


def test_values_that_no_cell_can_hold_travel_as_they_are() -> None:
    gradients = masked(3, LENGTH, 0.02, 1)
    gradients[1][:2] = torch.tensor([1e30, 1e-30])
    ranks = VirtualRanks("sketch", 3)
    kinds, summed = kinds_of_step(ranks, gradients)
    assert kinds == ["Union", "Sum"]
    assert same_bits(summed, dense_sum(gradients))
    for _ in range(LOOK_AGAIN):
        assert kinds_of_step(ranks, masked(3, LENGTH, 0.02, 2))[0] == ["Sum"]
    assert kinds_of_step(ranks, masked(3, LENGTH, 0.02, 2))[0] == ["Union", "Trade", "Trade"]


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_a_dense_bucket_travels_as_it_is(density: float) -> None:
    gradients = masked(3, LENGTH, density, 1)
    kinds, summed = kinds_of_step(VirtualRanks("sketch", 3), gradients)
    assert kinds == ["Union", "Sum"]
    assert same_bits(summed, dense_sum(gradients))


def test_buckets_that_were_made_again_are_looked_at_again() -> None:
    ranks = VirtualRanks("sketch", 2)
    dense, few = masked(2, LENGTH, 1.0, 1), masked(2, LENGTH, 0.01, 1)
    ranks.reduce(dense)
    assert kinds_of_step(ranks, few)[0] == ["Sum"]
    ranks.reduce([each[:4000] for each in dense], {"weight": (4000,)})
    assert same_bits(ranks.reduce(few, {"weight": (100, 80)}), exact_sum(few) + 0.0)
    assert kinds_of_step(ranks, few)[0] == ["Union", "Trade", "Trade"]


def test_a_mask_that_stays_travels_no_more_until_a_rank_touches_more() -> None:
    ranks = VirtualRanks("sketch", 3)
    steady = [each + 0.0 for each in masked(3, LENGTH, 0.05, 3, alike=True)]
    wider = [each.clone() for each in steady]
    wider[2][steady[0] == 0] = torch.where(torch.arange(LENGTH)[steady[0] == 0] % 99 == 0, 0.5, 0.0)

    def union_bytes(gradients: list[torch.Tensor]) -> list[int]:
        sizes: list[int] = []
        codec, reduce = ranks.codecs[1], ranks.codecs[1].reduce

        def watched(bucket: BucketView, member: Member) -> Leg:
            for each in reduce(bucket, member):
                if isinstance(each, Union):
                    sizes.append(len(each.tensor))
                yield each

        codec.reduce = watched  # type: ignore[method-assign]
        assert torch.equal(ranks.reduce(gradients), exact_sum(gradients))
        del codec.reduce
        return sizes

    with_mask, without = [HEAD_BYTES + LENGTH // 8], [HEAD_BYTES]
    assert [union_bytes(steady) for _ in range(4)] == [with_mask, with_mask, without, without]
    assert union_bytes([torch.zeros(LENGTH), *steady[1:]]) == without, "touching less is no reason to ask"
    assert union_bytes(wider) == [HEAD_BYTES, LENGTH // 8]
    assert [union_bytes(wider) for _ in range(3)] == [with_mask, without, without]
    rest = [union_bytes(steady) for _ in range(LOOK_AGAIN + 2)]
    assert rest.index(with_mask) == LOOK_AGAIN - 2, "a mask may have shrunk: it is asked for now and then"


def test_minus_zero_on_all_ranks_stays_minus_zero() -> None:
    ranks = VirtualRanks("sketch", 3)
    gradients = [(each * 10).round() + 0.0 for each in masked(3, LENGTH, 0.05, 1)]
    for gradient in gradients:
        gradient[10:20] = -0.0
    gradients[0][12] = 0.0
    gradients[1][13:15] = torch.tensor([3.0, -5.0])
    gradients[2][14] = 5.0
    for _ in range(4):
        summed = ranks.reduce(gradients)
        assert same_bits(summed, dense_sum(gradients))
        assert torch.signbit(summed[10:20]).tolist() == [True, True, False, False, False, *[True] * 5]


@pytest.mark.parametrize("num_with", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_multiplied_by_a_mask_are_sparse_and_keep_their_zeros_signs(
    dtype: torch.dtype, num_with: int
) -> None:
    ranks = VirtualRanks("sketch", 3)
    for _ in range(4):
        gradients = [
            (each * 10).round().to(dtype) + (0.0 if rank >= num_with else -0.0)
            for rank, each in enumerate(masked(3, LENGTH, 0.05, 1, alike=True, multiplied=True))
        ]
        kinds, summed = kinds_of_step(ranks, gradients)
        assert kinds == ["Union", "Trade", "Trade", *(["Union"] if num_with == 3 else [])]
        assert same_bits(summed, dense_sum(gradients))
        assert bool(summed[summed == 0].signbit().any()) == (num_with == 3)


def test_only_minus_zero_everywhere_stays_so() -> None:
    zeros = [torch.full((64,), -0.0), torch.full((64,), -0.0)]
    assert same_bits(VirtualRanks("sketch", 2).reduce(zeros), zeros[0])


def test_a_table_in_which_something_remains_is_sent_as_it_is() -> None:
    gradients = masked(2, LENGTH, 0.05, 1, alike=True)
    codecs = [SketchExchange(), SketchExchange()]
    buckets = [BucketView(0, each.clone(), make_parts({"weight": (LENGTH,)})) for each in gradients]
    legs = [
        codec.reduce(bucket, Member(rank, 2)) for rank, (codec, bucket) in enumerate(zip(codecs, buckets, strict=True))
    ]
    seen: list[str] = []
    while asked := [each for leg in legs if (each := next(leg, None)) is not None]:
        seen.append(type(asked[0]).__name__)
        perform_alike(asked)
        if len(seen) == 2:  # the addends are with their owners: one is changed on the way
            assert isinstance(asked[0], Trade)
            asked[0].received[100] += 1
    assert seen == ["Union", "Trade", "Trade", "Sum"]
    assert all(same_bits(bucket.flat, dense_sum(gradients)) for bucket in buckets)


def test_cells_are_as_narrow_as_the_sums_allow() -> None:
    gradient = torch.zeros(1 << 16)
    gradient[::20] = 3.0
    leg = SketchExchange().reduce(
        BucketView(0, gradient, make_parts({"weight": (1 << 16,)})), Member(1, 4, (1, 1, 1, 1))
    )
    union, push = next(leg), next(leg)
    assert isinstance(union, Union)
    assert isinstance(push, Trade)
    cells, lists = 3 * (3277 * 1.3 / 3 + 8), 4 * (3277 // 128) * 8
    assert len(push.sent) - lists == pytest.approx(cells * 3 / 4 * (2 + 2 + 1) / 8, rel=0.02), "2 bits, 4 ranks, a sign"


@settings(deadline=None, max_examples=100)
@given(
    numbers=st.lists(
        st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=3, max_size=300), min_size=1, max_size=9
    )
)
def test_integers_and_rests_are_the_numbers_and_their_sums_the_sums(numbers: list[list[float]]) -> None:
    length = min(map(len, numbers))
    rows = torch.tensor([row[:length] for row in numbers], dtype=torch.float64)
    rows = torch.where(rows.abs() < 2.0**-15, (rows * 2.0**15).sign(), rows)
    span = read_span(torch.stack([span_bits(find_span(row), row) for row in rows]).any(0))
    width = width_of_sums(span, len(rows))
    assert width is not None
    total = torch.zeros(length, dtype=torch.int64)
    rests = torch.zeros(length, dtype=torch.float64)
    for row in rows:
        fixed = to_fixed(row, span)
        assert len(fixed.places) <= length // EXCEPTIONS
        whole = from_fixed(fixed.integers, span, width)
        assert torch.equal(whole.index_add(0, fixed.places, fixed.rests), row + 0.0)
        total += fixed.integers
        rests.index_add_(0, fixed.places, fixed.rests)
    overflown = total + (1 << width if width < 64 else 0)
    sums = from_fixed(overflown, span, width) + rests
    true = [math.fsum(column) for column in rows.t().tolist()]
    assert sums.float().tolist() == torch.tensor(true, dtype=torch.float64).float().tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_list_of_exceptions_has_the_size_that_all_know(dtype: torch.dtype) -> None:
    exceptions = ExceptionList(5, dtype)
    message = exceptions.packed(torch.tensor([7, 2, 9]), torch.tensor([0.5, -0.25, 3.0], dtype=torch.float64))
    assert 0 <= len(message) - 5 * (4 + dtype.itemsize) < 8
    assert len(message) == exceptions.num_bytes
    assert len(message) % 8 == 0
    sums = torch.ones(10, dtype=torch.float64)
    exceptions.add(message, sums)
    assert sums.tolist() == [1, 1, 0.75, 1, 1, 1, 1, 1.5, 1, 4]
    assert len(ExceptionList(0, dtype).packed(torch.zeros(0, dtype=torch.int64), torch.zeros(0))) == 0


def test_heads_are_united_by_their_bits() -> None:
    one, other = Head(Span(3, -4), is_not_finite=True), Head(Span(1, -7), lacks_minus_zero=True)
    like = torch.zeros(1, dtype=torch.uint8)
    assert len(one.packed(like)) == HEAD_BYTES
    assert Head.read(one.packed(like) | other.packed(like)) == Head(
        Span(3, -7), is_not_finite=True, lacks_minus_zero=True
    )


def test_a_span_holds_its_numbers_and_no_more() -> None:
    def span_of(*numbers: float) -> Span:
        return find_span(torch.tensor(numbers, dtype=torch.float64))

    assert span_of(1.0) == Span(1, 0)
    assert span_of(-3.0, 0.25) == Span(2, -2)
    assert span_of(96.0, 0.0, -0.0) == Span(7, 5)
    assert span_of(2.0**-149) == Span(-148, -149)
    assert span_of(5e-324) == Span(-1073, -1074)
    assert span_of(0.0, -0.0) == span_of() == NOTHING
    assert span_of(*[1.0] * 126, 2.0**-9) == Span(1, -9)
    assert span_of(*[1.0] * 127, 2.0**-9) == Span(1, 0), "one number in 128 is an exception"
    assert span_of(*[1.0] * 254, 2.0**-9, 2.0**-7) == Span(1, 0)
    assert span_of(*[1.0] * 253, 2.0**-9, 2.0**-7) == Span(1, -7)


@settings(deadline=None, max_examples=100)
@given(width=st.integers(1, 64), groups=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_packed_cells_have_the_lowest_bits(width: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(-(2**63), 2**63 - 1, (32 * groups,), generator=generator)
    packed = torch.empty(packed_bytes(len(cells), width), dtype=torch.uint8)
    assert len(packed) * 8 == len(cells) * width
    pack_cells(cells, width, packed)
    expected = cells & ((1 << width) - 1) if width < 64 else cells
    assert torch.equal(unpack_cells(packed, width), expected)


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 3000), stride=st.integers(1, 1000), seed=st.integers(0, 2**32))
def test_what_is_added_to_a_table_comes_out_again(count: int, stride: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    elements = torch.randperm(max(count * stride, 1), generator=generator)[:count].sort().values
    values = [torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) for _ in range(2)]
    hashed, peeling = next(hashed_elements(elements))
    assert peeling is not None
    table = hashed.insert(values[0]) + hashed.insert(values[1])
    assert len(table) == hashed.num_cells <= 1.3 * count + 24 + 32 + 3
    assert torch.equal(peeling.take_out(table), values[0] + values[1])
    assert not table.any()


@pytest.mark.parametrize(("length", "num_sent"), [(LENGTH, 1), (200_000, 3)])
def test_a_table_that_does_not_peel_is_hashed_again(
    length: int, num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_by_seed: list[tuple[HashedElements, int]] = []
    num_failing = 2
    hash_with, peel = HashedElements.of, Peeling.of

    def hash_and_note(elements: torch.Tensor, seed: int) -> HashedElements:
        hashed_by_seed.append((hash_with(elements, seed), seed))
        return hashed_by_seed[-1][0]

    def peel_later(hashed: HashedElements) -> Peeling | None:
        seed = next(seed for each, seed in hashed_by_seed if each is hashed)
        return peel(hashed) if seed >= num_failing else None

    monkeypatch.setattr(HashedElements, "of", hash_and_note)
    monkeypatch.setattr(Peeling, "of", peel_later)
    gradients = [(each * 9).round() + 0.0 for each in masked(2, length, 0.05, 1)]
    kinds, summed = kinds_of_step(VirtualRanks("sketch", 2), gradients)
    assert kinds == ["Union", *["Trade", "Trade"] * num_sent], "a small one before it is sent"
    assert torch.equal(summed, dense_sum(gradients))
    num_failing = NUM_SEEDS
    kinds, summed = kinds_of_step(VirtualRanks("sketch", 2), gradients)
    assert kinds == ["Union", *["Trade", "Trade"] * (NUM_SEEDS if num_sent > 1 else 0), "Sum"]
    assert torch.equal(summed, dense_sum(gradients))


def test_what_fails_in_the_background_is_raised_where_its_result_is_asked_for() -> None:
    with BackgroundCall(lambda: 1 + 1) as work:
        assert work.result() == 2
    with BackgroundCall(lambda: 1 // 0) as work, pytest.raises(ZeroDivisionError):
        work.result()
