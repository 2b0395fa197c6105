"""Codecs of the core in one process: the sum of all ranks, the same bits on each, and nothing lost in the end."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, masked, same_bits
from tests.support.extensions import register
from torch import nn

from dynamix.lab.simulator.exchange import run_counted
from dynamix.runtime.extensions import ExtensionError
from dynamix.trainer.exchange.codec import (
    BucketView,
    CodedSquares,
    Collective,
    ErrorFeedback,
    Largest,
    Leg,
    Member,
    PlainExchange,
    Residuals,
    Sum,
    Union,
    chunks_of,
    run_alike,
    side_by_side,
    sum_together,
)
from dynamix.trainer.exchange.plan import CODECS, exchange_codec
from dynamix.trainer.exchange.rows import RowsExchange, table_share

LOSSY = [name for name in CODECS if not exchange_codec(name).is_lossless]
LOSSLESS = [name for name in CODECS if exchange_codec(name).is_lossless]
PER_NUMBER = {"int8": 2 / 127, "fp16": 2**-10, "bf16": 2**-7}
"""Rounding of one number relative to the largest of its block, both ways together, at most."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def residuals_of(ranks: VirtualRanks, rank: int) -> Residuals:
    codec = ranks.codecs[rank]
    assert isinstance(codec, ErrorFeedback)
    return codec.residuals


def weight_of(ranks: VirtualRanks, rank: int) -> torch.Tensor:
    return residuals_of(ranks, rank).by_key()["weight"]


@settings(deadline=None, max_examples=100)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.5]), min_size=1, max_size=8),
    rows=st.integers(1, 700),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_the_sum_is_the_dense_one_to_rounding_for_any_size_type_and_shares(
    *, codec: str, weights: list[float], rows: int, density: float, dtype: torch.dtype, seed: int
) -> None:
    num_ranks = len(weights)
    ranks = VirtualRanks(codec, num_ranks, tuple(weights) if sum(weights) else ())
    shapes = {"table": (rows, 3), "bias": (5,)}
    tolerance = {torch.bfloat16: 2**-6, torch.float16: 2**-8}.get(dtype, 1e-5) + PER_NUMBER.get(codec, 0)
    for step in range(2):
        gradients = [each.to(dtype) for each in masked(num_ranks, 3 * rows + 5, density, seed + step)]
        summed = ranks.reduce(gradients, shapes)
        assert summed.dtype == dtype
        difference = (summed.double() - dense_sum([each.double() for each in gradients])).abs().max().item()
        assert difference <= tolerance * 6 * num_ranks


@pytest.mark.parametrize("shares", [(), (5, 0, 1, 2.5)])
@pytest.mark.parametrize("codec", LOSSLESS)
def test_whole_numbers_have_the_dense_sum_bit_for_bit(codec: str, shares: tuple[float, ...]) -> None:
    ranks = VirtualRanks(codec, 4, shares)
    shapes = {"table": (600, 10), "bias": (37,), "dense": (9, 11)}
    for step in range(3):
        gradients = [(each * 50).round() + 0.0 for each in masked(4, 6136, 0.1, step)]
        assert same_bits(ranks.reduce(gradients, shapes), dense_sum(gradients))


def test_a_bucket_in_chunks_has_the_bits_of_the_whole_whoever_owns_what() -> None:
    gradients = torch.randn(4, 100_001, generator=torch.Generator().manual_seed(4))
    whole = gradients[0] + gradients[1] + gradients[2] + gradients[3]  # in rank order
    for shares in ((1.0, 1.0, 1.0, 1.0), (5.0, 0.0, 1.0, 2.5)):
        rows, codec = gradients.clone(), PlainExchange()
        members = [Member(rank, 4, shares) for rank in range(4)]
        chunks = [
            chunks_of(codec, BucketView(0, *each, ()), of) for each, of in zip(rows.split(1), members, strict=True)
        ]
        assert {len(each) for each in chunks} == {6}
        for of_ranks in zip(*chunks, strict=True):
            run_alike([codec.reduce(*each) for each in zip(of_ranks, members, strict=True)])
        assert all(torch.equal(row, whole) for row in rows)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_numbers_beside_a_bucket_are_summed_in_its_messages(codec: str) -> None:
    gradients, ranks = masked(4, 3000, 1.0, 1), VirtualRanks(codec, 4, (5, 0, 1, 2.5))
    rows = [each.clone() for each in gradients]
    numbers = [[torch.tensor([float(rank), 0.5]), torch.full((7,), float(rank))] for rank in range(4)]
    legs = [
        side_by_side(
            exchange_codec(codec).reduce(BucketView(0, row, make_parts({"weight": (3000,)})), member),
            sum_together(beside, member),
        )
        for row, beside, member in zip(rows, numbers, ranks.members(), strict=True)
    ]
    assert len(run_counted(legs)) == 2, "no messages of its own"
    whole = ranks.reduce(gradients)
    assert all(same_bits(row, whole) for row in rows)
    assert all(torch.cat(beside).tolist() == [6.0, 2.0] + [6.0] * 7 for beside in numbers)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shares", [(), (1, 0, 2, 1)])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_on_one_rank_ends_as_in_an_all_reduce(
    codec: str, shares: tuple[float, ...], bad: float
) -> None:
    ranks = VirtualRanks(codec, 4, shares)
    gradients = masked(4, 2000, 0.1, 3)
    ranks.reduce(gradients)
    before = weight_of(ranks, 2).clone() if codec in LOSSY else None
    gradients[1][700] = bad
    summed, dense = ranks.reduce(gradients), dense_sum(gradients)
    assert torch.equal(summed.isfinite(), dense.isfinite())
    assert torch.allclose(summed, dense, rtol=1e-6, equal_nan=True), "the whole bucket went as it is"
    assert before is None or torch.equal(before, weight_of(ranks, 2))


# --- codecs that round ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", LOSSY)
def test_the_sum_over_200_steps_lacks_no_more_than_the_residuals(codec: str, dtype: torch.dtype) -> None:
    ranks = VirtualRanks(codec, 3, (1, 0, 3))
    true, received = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    largest = []
    for step in range(200):
        gradients = [each.to(dtype) for each in masked(3, 1500, 0.5, step)]
        true += dense_sum([each.double() for each in gradients])
        received += ranks.reduce(gradients).double()
        kept = torch.stack([weight_of(ranks, rank).double() for rank in range(3)]).sum(0)
        assert (true - received - kept).abs().max().item() < 1e-3, "float32 over 200 steps"
        largest.append(kept.abs().max().item())
    assert max(largest) <= (PER_NUMBER[codec] + (2**-8 if dtype == torch.bfloat16 else 0)) * 15, "as after one step"
    assert max(largest[100:]) <= 1.5 * max(largest[:100])


@pytest.mark.parametrize("codec", LOSSY)
def test_residuals_follow_their_parameter_into_other_buckets_owners_and_checkpoints(codec: str) -> None:
    ranks = VirtualRanks(codec, 2, (1, 3))
    shapes = {"a": (700,), "b": (20, 30), "c": (5,)}
    sizes = [700, 600, 5]
    gradients = [masked(1, 1305, 1.0, rank)[0] for rank in range(2)]
    received = dict(zip(shapes, ranks.reduce(gradients, shapes).split(sizes), strict=True))
    resumed = VirtualRanks(codec, 2, (2, 1))
    for rank in range(2):
        residuals_of(resumed, rank).load(residuals_of(ranks, rank).by_key())
    for number, keys in enumerate((["c", "b"], ["a"])):
        lengths = [torch.Size(shapes[key]).numel() for key in keys]
        nothing = [torch.zeros(sum(lengths))] * 2
        summed = resumed.reduce(nothing, {key: shapes[key] for key in keys}, number=number, flush=True)
        for key, part in zip(keys, summed.split(lengths), strict=True):
            received[key] = received[key] + part
    assert torch.allclose(torch.cat(list(received.values())), dense_sum(gradients), rtol=0, atol=1e-6)
    assert all(not each.any() for rank in range(2) for each in residuals_of(resumed, rank).by_key().values())
    residuals_of(resumed, 0).load({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="the residual of a has 3 numbers, the parameter 700: it is of another"):
        resumed.reduce(gradients, shapes)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_reduction_that_fails_leaves_the_residuals_as_they_were(codec: str) -> None:
    ranks = VirtualRanks(codec, 2)
    ranks.reduce(masked(2, 900, 1.0, 1))
    before = weight_of(ranks, 0).clone()
    bucket = BucketView(0, masked(1, 900, 1.0, 3)[0], make_parts({"weight": (900,)}))
    for num_collectives in (1, 2):
        leg = ranks.codecs[0].reduce(bucket, Member(0, 2))
        for _ in range(num_collectives):
            next(leg)
        leg.close()
        assert torch.equal(weight_of(ranks, 0), before)


@pytest.mark.parametrize("scale", [1e-38, 1e37])
@pytest.mark.parametrize("codec", LOSSY)
def test_codecs_keep_their_precision_at_any_scale(codec: str, scale: float) -> None:
    gradients = [each.clamp(-3, 3) * scale for each in masked(2, 1024, 1.0, 7)]
    ranks = VirtualRanks(codec, 2)
    received = torch.stack([ranks.reduce(gradients).double() for _ in range(20)]).sum(0)
    true = 20 * dense_sum([each.double() for each in gradients])
    assert received.isfinite().all()
    assert (received - true).abs().max().item() <= (9 * PER_NUMBER[codec] * scale if scale > 1e-37 else math.inf)


def test_a_codec_that_rounds_measures_how_much_of_a_gradient_it_has_sent() -> None:
    ranks = VirtualRanks("int8", 2, (1, 0))
    gradients = [torch.full((512,), 0.25), torch.full((512,), 0.25)]
    for each in gradients:
        each[7] = 127.0
    ranks.reduce(gradients, {"table": (512, 1)})
    first, second = (codec.coded for codec in ranks.codecs if isinstance(codec, ErrorFeedback))
    assert first == CodedSquares(0.0, 0.0), "the owner of all sends itself nothing"
    assert second == CodedSquares(127.0**2 + 511 * 0.25**2, 127.0**2), "what is below half a step is not sent"


# --- rows ----------------------------------------------------------------------------------------------------------


def test_only_touched_rows_are_sent_and_one_bit_for_every_row() -> None:
    def num_sent(gradient: torch.Tensor) -> list[int]:
        """Numbers, or bytes, in what one of two ranks asks for, its gradient alone being touched."""
        leg = RowsExchange().reduce(BucketView(0, gradient, make_parts({"table": (1000, 8)})), Member(0, 2))
        return [len(each.tensor) for each in leg if isinstance(each, Sum | Union)]

    assert num_sent(torch.zeros(8000)) == [1 + 125]
    gradient = torch.zeros(8000)
    gradient[8 * 3 : 8 * 5] = 1.0
    gradient[8 * 999 + 7] = -0.0
    assert num_sent(gradient) == [1 + 125, 24]


@pytest.mark.parametrize("num_with", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_multiplied_by_a_mask_are_sent_by_rows_and_keep_the_signs_of_their_zeros(
    dtype: torch.dtype, num_with: int
) -> None:
    shapes = {"wide": (1000, 1), "tail": (27,)}
    gradients = [
        (each * 10).round().to(dtype) + (0.0 if rank >= num_with else -0.0)
        for rank, each in enumerate(masked(3, 1027, 0.05, 1, multiplied=True))
    ]
    ranks = VirtualRanks("rows", 3)
    for _ in range(2):
        assert same_bits(ranks.reduce(gradients, shapes), dense_sum(gradients))
    leg = ranks.codecs[0].reduce(BucketView(0, gradients[0].clone(), make_parts(shapes)), Member(0, 3))
    assert 2 <= len(list(leg)) <= 3, "nothing was left alone"


class Tied(nn.Module):
    """A table whose numbers are an output layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Embedding(10, 4)
        self.outputs = nn.Linear(4, 10, bias=False)
        self.outputs.weight = self.inputs.weight


def test_tables_count_but_not_where_their_gradient_is_dense_or_sent_sparse() -> None:
    assert table_share([nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 5, bias=False))]) == 40 / 60
    assert table_share([nn.Embedding(10, 4), nn.Linear(4, 5, bias=False)]) == 40 / 60
    assert table_share([nn.EmbeddingBag(10, 4)]) == 1.0
    assert table_share([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 5)]) == 0.0
    assert table_share([Tied()]) == 0.0
    frozen = nn.Embedding(10, 4)
    frozen.weight.requires_grad_(requires_grad=False)
    assert table_share([frozen, nn.Linear(4, 5)]) == 0.0
    assert table_share([nn.Linear(4, 5)]) == 0.0


# --- owners, collectives, extensions -------------------------------------------------------------------------------


def _ask(*collectives: Collective) -> Leg:
    yield from collectives


def test_virtual_ranks_that_ask_for_different_collectives_are_refused() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    for first, second, why in (
        ([Sum(two)], [Largest(two)], "different collectives"),
        ([Sum(one)], [Sum(two)], "different collectives"),
        ([Sum(two)], [], r"ranks \[1\] ended before the others"),
    ):
        with pytest.raises(RuntimeError, match=why):
            run_alike([_ask(*first), _ask(*second)])


class _HalfCodec:
    name = "half"
    is_lossless = False

    def reduce(self, bucket: BucketView, _member: Member) -> Leg:
        yield Sum(bucket.flat)


def test_what_is_no_codec_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "foreign", "dynamix.codecs", half=f"{__name__}:_HalfCodec")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExtensionError, match="_HalfCodec rounds: it must derive from ErrorFeedback"):
        exchange_codec("half")
    with pytest.raises(ValueError, match=r"exchange codec 'int9' is unknown.*did you mean int8"):
        exchange_codec("int9")
