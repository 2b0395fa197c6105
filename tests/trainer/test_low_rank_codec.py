"""PowerSGD: two thin factors instead of a matrix, the same bits on every rank, and nothing lost in the end."""

import math

import pytest
import torch
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, same_bits

from dynamix.trainer.exchange.codec import BucketView, Member
from dynamix.trainer.exchange.collectives import Sum
from dynamix.trainer.exchange.low_rank import RANK, LowRankExchange, exact_dot, orthogonal

SHAPES = {"wide": (30, 50), "bias": (7,), "kernel": (32, 4, 3, 3), "small": (3, 3)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
LENGTH = sum(SIZES)


def drawn(
    num_ranks: int, seed: int, directions: int | None = None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Gradients by rank: random ones, or with matrices of so many common directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = []
    left = {key: normal(shape[0], directions or 1) for key, shape in SHAPES.items()}
    for _ in range(num_ranks):
        parts = []
        for (key, shape), size in zip(SHAPES.items(), SIZES, strict=True):
            if directions is None or len(shape) == 1:
                parts.append(normal(size))
            else:
                parts.append((left[key] @ normal(directions, size // shape[0])).flatten())
        found.append(torch.cat(parts).to(dtype))
    return found


def kept(ranks: VirtualRanks) -> torch.Tensor:
    """The sum over ranks of what was not sent yet."""
    residuals = [codec.residuals() for codec in ranks.codecs]  # type: ignore[attr-defined]
    return torch.cat([sum(each[key].double() for each in residuals) for key in SHAPES])


@pytest.mark.parametrize("shares", [(), (1, 0, 2)])
def test_a_sum_of_few_directions_arrives_in_one_step(shares: tuple[float, ...]) -> None:
    ranks = VirtualRanks("powersgd", 3, shares)
    for seed in range(3):
        gradients = drawn(3, seed, directions=RANK, dtype=torch.float64)
        summed, true = ranks.reduce(gradients, SHAPES), dense_sum(gradients)
        assert (summed - true).abs().max() < 1e-5 * true.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_a_sum_lacks_is_in_the_residuals(dtype: torch.dtype) -> None:
    ranks = VirtualRanks("powersgd", 3)
    true, received = torch.zeros(LENGTH, dtype=torch.float64), torch.zeros(LENGTH, dtype=torch.float64)
    largest = []
    for seed in range(60):
        gradients = [each.to(dtype) for each in drawn(3, seed)]
        true += dense_sum([each.double() for each in gradients])
        received += ranks.reduce(gradients, SHAPES).double()
        assert (true - received - kept(ranks)).abs().max() < (1e-9 if dtype == torch.float64 else 1e-3)
        largest.append(kept(ranks).norm().item())
    assert max(largest[40:]) < 1.5 * max(largest[20:40]), "it does not grow for ever"
    received += ranks.reduce([torch.zeros(LENGTH, dtype=dtype)] * 3, SHAPES, flush=True).double()
    assert (true - received).abs().max() < (0.2 if dtype == torch.bfloat16 else 1e-3)
    assert not kept(ranks).any()


def test_a_constant_gradient_arrives_as_a_whole_in_the_mean() -> None:
    ranks, gradients = VirtualRanks("powersgd", 2), drawn(2, 5)
    received = sum(ranks.reduce(gradients, SHAPES) for _ in range(100)) / 100
    true = dense_sum(gradients)
    assert isinstance(received, torch.Tensor)
    assert (received - true).norm() < 0.2 * true.norm()
    assert (ranks.reduce(gradients, SHAPES) - true).norm() > 0.3 * true.norm(), "a single step has a loss"


def test_small_matrices_and_vectors_travel_as_they_are() -> None:
    ranks = VirtualRanks("powersgd", 2)
    gradients = drawn(2, 1)
    summed, true = ranks.reduce(gradients, SHAPES).split(SIZES), dense_sum(gradients).split(SIZES)
    assert [same_bits(*pair) for pair in zip(summed, true, strict=True)] == [False, True, False, True]


def test_a_rank_sends_both_factors_and_no_matrix() -> None:
    bucket = BucketView(0, drawn(1, 1)[0], make_parts(SHAPES))
    leg = LowRankExchange(2).reduce(bucket, Member(0, 2))
    lengths = []
    for asked in leg:
        assert isinstance(asked, Sum)
        lengths.append(len(asked.tensor))
    assert lengths == [7 + 9 + 2 * (30 + 32), 2 * (50 + 36)]


def test_residuals_follow_their_parameter_into_other_buckets() -> None:
    ranks, gradients = VirtualRanks("powersgd", 2), drawn(2, 3)
    received = dict(zip(SHAPES, ranks.reduce(gradients, SHAPES).split(SIZES), strict=True))
    for number, keys in enumerate((["small", "kernel"], ["wide", "bias"])):
        shapes = {key: SHAPES[key] for key in keys}
        sizes = [math.prod(shape) for shape in shapes.values()]
        summed = ranks.reduce([torch.zeros(sum(sizes))] * 2, shapes, number=number, flush=True)
        for key, part in zip(keys, summed.split(sizes), strict=True):
            received[key] = received[key] + part
    assert torch.allclose(torch.cat(list(received.values())), dense_sum(gradients), atol=1e-5)


@pytest.mark.parametrize("codec", ["powersgd", "int8"])
def test_a_step_that_is_undone_or_fails_leaves_the_residuals_as_they_were(codec: str) -> None:
    ranks = VirtualRanks(codec, 2)
    ranks.reduce(drawn(2, 1), SHAPES)
    before = kept(ranks)
    assert before.any()
    for each in ranks.codecs:
        each.begin_step()  # type: ignore[attr-defined]
    ranks.reduce(drawn(2, 2), SHAPES)
    ranks.reduce(drawn(2, 3), {key: SHAPES[key] for key in reversed(SHAPES)})
    assert not torch.equal(kept(ranks), before)
    for each in ranks.codecs:
        each.undo_step()  # type: ignore[attr-defined]
    assert torch.equal(kept(ranks), before)
    for each in ranks.codecs:
        each.scale_residuals(0.5)  # type: ignore[attr-defined]
    assert torch.equal(kept(ranks), before / 2)
    leg = ranks.codecs[0].reduce(BucketView(0, drawn(1, 4)[0], make_parts(SHAPES)), Member(0, 2))
    next(leg)
    next(leg)
    leg.close()
    assert torch.equal(kept(ranks), before / 2)


def test_columns_become_orthogonal_and_what_adds_nothing_becomes_zero() -> None:
    columns = torch.randn(101, 3, generator=torch.Generator().manual_seed(1))
    found = orthogonal(torch.cat([columns, columns[:, :1] * 2, torch.zeros(101, 1)], 1)).double()
    expected = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert torch.allclose(found.T @ found, expected, atol=1e-6)
    assert torch.equal(orthogonal(torch.zeros(5, 2)), torch.zeros(5, 2))


def test_scalar_products_add_in_an_order_of_their_own() -> None:
    numbers = torch.tensor([1.0, 1e16, 1.0, -1e16, 3.0], dtype=torch.float64)
    products = numbers * 1.0
    halves = [products[0] + products[2], products[1] + products[3], products[4]]
    expected = (halves[0] + halves[1]) + halves[2]
    assert exact_dot(numbers, torch.ones(5, dtype=torch.float64)) == expected
