"""Codecs `sketch` and `powersgd`, attached by their entry points, on ranks in one process."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, masked, same_bits

from dynamix.extras.powersgd import RANK, LowRankExchange
from dynamix.extras.sketch import LOOK_AGAIN, Peeling
from dynamix.trainer.exchange.codec import BucketView, ErrorFeedback, Leg, Member, Sum, Trade, perform_alike

LENGTH = 8000


def exact_sum(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The true sums, rounded once to the type of the gradients."""
    columns = zip(*[each.double().tolist() for each in gradients], strict=True)
    return torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).to(gradients[0].dtype)


def kinds_of_step(ranks: VirtualRanks, gradients: list[torch.Tensor]) -> tuple[list[str], torch.Tensor]:
    """The kinds of rank 0's collectives in a step, and the sum."""
    asked: list[str] = []
    first, reduce = ranks.codecs[0], ranks.codecs[0].reduce

    def watched(bucket: BucketView, member: Member) -> Leg:
        for each in reduce(bucket, member):
            asked.append(type(each).__name__)
            yield each

    first.reduce = watched  # type: ignore[method-assign]
    summed = ranks.reduce(gradients)
    del first.reduce
    return asked, summed


@settings(deadline=None, max_examples=100)
@given(
    num_ranks=st.integers(2, 8),
    length=st.integers(1, 9000),
    density=st.sampled_from([0.0, 0.01, 0.04]),
    lowest=st.sampled_from([1.0, 1e-6, 1e-15, 1e-36]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    alike=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_sketch_sums_to_the_true_sum_rounded_once(
    *, num_ranks: int, length: int, density: float, lowest: float, dtype: torch.dtype, alike: bool, seed: int
) -> None:
    ranks = VirtualRanks("sketch", num_ranks)
    for step in range(3):
        gradients = masked(num_ranks, length, density, seed + step * (not alike), alike=alike)
        for rank, gradient in enumerate(gradients):
            gradient[gradient.nonzero().flatten()[rank::200]] *= lowest  # sent beside the table
        gradients = [each.to(dtype) for each in gradients]
        kinds, summed = kinds_of_step(ranks, gradients)
        true = exact_sum(gradients) if "Trade" in kinds else dense_sum(gradients)
        assert torch.equal(summed, true)


@pytest.mark.parametrize("num_with", [0, 1, 2, 3])
def test_a_sketch_keeps_the_signs_of_zeros(num_with: int) -> None:
    ranks = VirtualRanks("sketch", 3)
    for _ in range(3):
        gradients = [
            (each * 10).round() + (0.0 if rank >= num_with else -0.0)
            for rank, each in enumerate(masked(3, LENGTH, 0.05, 1, alike=True, multiplied=True))
        ]
        kinds, summed = kinds_of_step(ranks, gradients)
        assert kinds == ["Union", "Trade", "Trade", *(["Union"] if num_with == 3 else [])]
        assert same_bits(summed, dense_sum(gradients))


def test_a_bucket_that_no_sketch_can_hold_is_sent_as_it_is_and_looked_at_again() -> None:
    few = masked(3, LENGTH, 0.02, 2)
    for gradients in (masked(3, LENGTH, 1.0, 1), masked(3, LENGTH, 0.02, 1)):
        gradients[1][:2] = torch.tensor([1e30, 1e-30])
        ranks = VirtualRanks("sketch", 3)
        kinds, summed = kinds_of_step(ranks, gradients)
        assert kinds == ["Union", "Sum"]
        assert same_bits(summed, dense_sum(gradients))
        for _ in range(LOOK_AGAIN):
            assert kinds_of_step(ranks, few)[0] == ["Sum"]
        assert kinds_of_step(ranks, few)[0] == ["Union", "Trade", "Trade"]


def test_a_table_in_which_something_remains_or_that_does_not_peel_is_sent_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = [(each * 9).round() + 0.0 for each in masked(2, LENGTH, 0.05, 1, alike=True)]
    ranks = VirtualRanks("sketch", 2)
    buckets = [BucketView(0, each.clone(), make_parts({"weight": (LENGTH,)})) for each in gradients]
    members = [Member(rank, 2) for rank in range(2)]
    legs = [codec.reduce(bucket, each) for codec, bucket, each in zip(ranks.codecs, buckets, members, strict=True)]
    seen: list[str] = []
    while asked := [each for leg in legs if (each := next(leg, None)) is not None]:
        seen.append(type(asked[0]).__name__)
        perform_alike(asked)
        if len(seen) == 2:  # the addends are with their owners: one is changed on the way
            assert isinstance(asked[0], Trade)
            asked[0].received[100] += 1
    assert seen == ["Union", "Trade", "Trade", "Sum"]
    assert all(same_bits(bucket.flat, dense_sum(gradients)) for bucket in buckets)
    monkeypatch.setattr(Peeling, "of", lambda _hashed: None)
    kinds, summed = kinds_of_step(VirtualRanks("sketch", 2), gradients)
    assert kinds[-1] == "Sum"
    assert same_bits(summed, dense_sum(gradients))


# --- powersgd ------------------------------------------------------------------------------------------------------

SHAPES = {"wide": (30, 50), "bias": (7,), "kernel": (32, 4, 3, 3), "small": (3, 3)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]


def drawn(num_ranks: int, seed: int, directions: int | None = None) -> list[torch.Tensor]:
    """Gradients by rank: random ones, or with matrices of so many common directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left = {key: normal(shape[0], directions or 1) for key, shape in SHAPES.items()}
    return [
        torch.cat(
            [
                normal(size)
                if directions is None or len(shape) == 1
                else (left[key] @ normal(directions, size // shape[0])).flatten()
                for (key, shape), size in zip(SHAPES.items(), SIZES, strict=True)
            ]
        )
        for _ in range(num_ranks)
    ]


def test_powersgd_sends_a_sum_of_few_directions_in_one_step_and_small_matrices_as_they_are() -> None:
    ranks = VirtualRanks("powersgd", 3, (1, 0, 2))
    gradients = drawn(3, 1, directions=RANK)
    summed, true = ranks.reduce(gradients, SHAPES), dense_sum(gradients)
    assert (summed - true).abs().max() < 1e-5 * true.abs().max()
    exact = [same_bits(*pair) for pair in zip(summed.split(SIZES), true.split(SIZES), strict=True)]
    assert exact == [False, True, False, True]
    lengths = []
    for asked in LowRankExchange(2).reduce(BucketView(0, drawn(1, 1)[0], make_parts(SHAPES)), Member(0, 2)):
        assert isinstance(asked, Sum)
        lengths.append(len(asked.tensor))
    assert lengths == [7 + 9 + 2 * (30 + 32), 2 * (50 + 36)], "both factors and no matrix"


def test_what_a_sum_of_powersgd_lacks_is_in_the_residuals_and_a_nan_goes_as_it_is() -> None:
    ranks = VirtualRanks("powersgd", 3)
    true, received = torch.zeros(sum(SIZES), dtype=torch.float64), torch.zeros(sum(SIZES), dtype=torch.float64)

    def kept() -> torch.Tensor:
        found = [codec.residuals.by_key() for codec in ranks.codecs if isinstance(codec, ErrorFeedback)]
        return torch.cat([torch.stack([each[key] for each in found]).sum(0) for key in SHAPES])

    largest = []
    for seed in range(60):
        gradients = drawn(3, seed)
        true += dense_sum(gradients)
        received += ranks.reduce(gradients, SHAPES)
        assert (true - received - kept()).abs().max() < 1e-9
        largest.append(kept().norm().item())
    assert max(largest[40:]) < 1.5 * max(largest[20:40]), "it does not grow for ever"
    before, gradients = kept(), drawn(3, 99)
    gradients[1][3] = math.nan
    assert torch.allclose(ranks.reduce(gradients, SHAPES), dense_sum(gradients), equal_nan=True)
    assert torch.equal(kept(), before)
    received += ranks.reduce([torch.zeros(sum(SIZES), dtype=torch.float64)] * 3, SHAPES, flush=True)
    assert (true - received).abs().max() < 1e-9
    assert not kept().any()
