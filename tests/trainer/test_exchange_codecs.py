"""Exchange codecs: the sum of all ranks, the same bits on each, in whatever way it travels."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.exchanges import VirtualRanks, dense_sum, make_parts, masked, same_bits
from tests.support.extensions import register

from dynamix.runtime.extensions import ExtensionError
from dynamix.trainer.exchange.codec import BucketView, CodedSquares, ErrorFeedbackCodec, MeasuredCodec, Member
from dynamix.trainer.exchange.collectives import Largest, Leg, Sum, Trade, Union, run_alike
from dynamix.trainer.exchange.owners import PlainExchange, chunks_of, owned_ranges
from dynamix.trainer.exchange.registry import CODECS, exchange_codec

LOSSY = [name for name in CODECS if not exchange_codec(name).is_lossless]
LOSSLESS = [name for name in CODECS if exchange_codec(name).is_lossless]
NARROW = [name for name in LOSSY if name != "powersgd"]
PER_NUMBER = {"int8": 2 / 127, "fp16": 2**-10, "bf16": 2**-7}
"""Rounding of one number relative to the largest of its block, both ways together, at most."""


def feedback_codec(ranks: VirtualRanks, rank: int) -> ErrorFeedbackCodec:
    codec = ranks.codecs[rank]
    assert isinstance(codec, ErrorFeedbackCodec)
    return codec


def test_a_bucket_in_chunks_has_the_bits_of_the_whole_whoever_owns_what() -> None:
    gradients = torch.randn(4, 100_001, generator=torch.Generator().manual_seed(4))

    def summed(shares: tuple[float, ...], num_bytes: float, num_chunks: int) -> torch.Tensor:
        rows = gradients.clone()
        members = [Member(rank, 4, shares) for rank in range(4)]
        chunks = [chunks_of(BucketView(0, row, ()), num_bytes) for row in rows.unbind()]
        assert {len(each) for each in chunks} == {num_chunks}
        for of_ranks in zip(*chunks, strict=True):
            run_alike([PlainExchange().reduce(*each) for each in zip(of_ranks, members, strict=True)])
        assert all(torch.equal(row, rows[0]) for row in rows)
        return rows[0]

    whole = summed((1.0, 1.0, 1.0, 1.0), 65_535, 1)
    assert torch.equal(whole, gradients[0] + gradients[1] + gradients[2] + gradients[3])  # in rank order
    for shares in ((1.0, 1.0, 1.0, 1.0), (333.0, 333.0, 0.0, 333.0), (5.0, 0.0, 1.0, 2.5)):
        assert torch.equal(summed(shares, 4 * 100_001, 6), whole)
        assert torch.equal(summed(shares, 1e9, 8), whole)


@pytest.mark.parametrize("shares", [(), (1, 1, 1, 1), (5, 0, 1, 2.5), (0, 0, 0, 1)])
@pytest.mark.parametrize("codec", LOSSLESS)
def test_whole_numbers_have_the_dense_sum_bit_for_bit(codec: str, shares: tuple[float, ...]) -> None:
    ranks = VirtualRanks(codec, 4, shares)
    shapes = {"table": (600, 10), "bias": (37,), "dense": (9, 11)}
    for step in range(3):
        gradients = [(each * 50).round() + 0.0 for each in masked(4, 6136, 0.1, step)]
        assert same_bits(ranks.reduce(gradients, shapes), dense_sum(gradients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("codec", CODECS)
def test_random_numbers_have_the_dense_sum_to_rounding(codec: str, num_ranks: int, dtype: torch.dtype) -> None:
    gradients = [each.to(dtype) for each in masked(num_ranks, 4099, 0.2, num_ranks)]
    exact = dense_sum([each.double() for each in gradients])
    largest = sum(each.abs().double() for each in gradients).max().item()
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(dtype, 1e-6) + PER_NUMBER.get(codec, 0)
    for shares in ((), tuple(range(num_ranks - 1, -1, -1)) if num_ranks > 1 else (1,)):
        summed = VirtualRanks(codec, num_ranks, shares).reduce(gradients, {"table": (4099, 1)})
        assert summed.dtype == dtype
        assert (summed.double() - exact).abs().max().item() <= tolerance * largest


def test_a_codec_with_loss_knows_how_much_of_a_gradient_it_has_sent() -> None:
    ranks = VirtualRanks("int8", 2, (1, 0))
    gradients = [torch.full((512,), 0.25), torch.full((512,), 0.25)]
    for each in gradients:
        each[7] = 127.0
    ranks.reduce(gradients, {"table": (512, 1)})
    (first, second) = (codec.coded() for codec in ranks.codecs if isinstance(codec, MeasuredCodec))
    assert first == CodedSquares(0.0, 0.0), "the owner of all sends itself nothing"
    assert second == CodedSquares(127.0**2 + 511 * 0.25**2, 127.0**2), "what is below half a step is not sent"


@pytest.mark.parametrize("codec", NARROW)
def test_what_a_codec_that_rounds_sends_has_the_norm_of_the_gradient(codec: str) -> None:
    ranks = VirtualRanks(codec, 4)
    for step in range(9):
        ranks.reduce([torch.randn(4096, generator=torch.Generator().manual_seed(step + 9 * r)) for r in range(4)])
    for each in ranks.codecs:
        assert isinstance(each, MeasuredCodec)
        wanted, sent = each.coded()
        assert sent / wanted == pytest.approx(1.0, abs=1e-3)
        assert wanted == pytest.approx(2 * 3072, rel=0.1), "of nine times the first and the last are measured"


@settings(deadline=None, max_examples=60)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.5]), min_size=1, max_size=8),
    rows=st.integers(1, 700),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_ranks_agree_for_any_size_and_any_shares(
    codec: str, weights: list[float], rows: int, density: float, seed: int
) -> None:
    num_ranks = len(weights)
    ranks = VirtualRanks(codec, num_ranks, tuple(weights) if sum(weights) else ())
    shapes = {"table": (rows, 3), "bias": (5,)}
    for step in range(2):
        gradients = masked(num_ranks, 3 * rows + 5, density, seed + step)
        difference = (ranks.reduce(gradients, shapes) - dense_sum(gradients)).abs().max().item()
        assert difference <= 1e-5 + PER_NUMBER.get(codec, 0) * 6 * num_ranks


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_without_a_gradient_add_nothing(codec: str) -> None:
    ranks = VirtualRanks(codec, 3)
    (gradient,) = masked(1, 2000, 1.0, 5)
    nothing = torch.zeros(2000)
    assert same_bits(ranks.reduce([nothing, nothing, nothing]), nothing)
    summed = ranks.reduce([nothing, (gradient * 30).round() + 0.0, nothing])
    assert (summed - (gradient * 30).round()).abs().max().item() <= PER_NUMBER.get(codec, 0) * 200


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 700, 1999])
@pytest.mark.parametrize("shares", [(), (1, 0, 2, 1)])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_on_one_rank_ends_as_in_an_all_reduce(
    codec: str, shares: tuple[float, ...], where: int, bad: float
) -> None:
    ranks = VirtualRanks(codec, 4, shares)
    gradients = masked(4, 2000, 0.1, 3)
    ranks.reduce(gradients)
    before = [{**feedback_codec(ranks, 2).residuals()}["weight"].clone()] if codec in LOSSY else []
    gradients[1][where] = bad
    summed, dense = ranks.reduce(gradients), dense_sum(gradients)
    assert torch.equal(summed.isfinite(), dense.isfinite())
    assert summed[where].isnan() if math.isnan(bad) else summed[where] == bad
    assert torch.allclose(summed, dense, rtol=1e-6, equal_nan=True), "the whole bucket went as it is"
    after = [{**feedback_codec(ranks, 2).residuals()}["weight"]] if codec in LOSSY else []
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("shares", [(), (1, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", NARROW)
def test_the_sum_over_200_steps_lacks_no_more_than_the_residuals(
    codec: str, dtype: torch.dtype, shares: tuple[float, ...]
) -> None:
    ranks = VirtualRanks(codec, 3, shares)
    true, received = torch.zeros(1500, dtype=torch.float64), torch.zeros(1500, dtype=torch.float64)
    largest = []
    for step in range(200):
        gradients = [each.to(dtype) for each in masked(3, 1500, 0.5, step)]
        true += dense_sum([each.double() for each in gradients])
        received += ranks.reduce(gradients).double()
        kept = sum(feedback_codec(ranks, rank).residuals()["weight"].double() for rank in range(3))
        assert isinstance(kept, torch.Tensor)
        assert (true - received - kept).abs().max().item() < 1e-3, "float32 over 200 steps"
        largest.append(kept.abs().max().item())
    per_step = (PER_NUMBER[codec] + (2**-8 if dtype == torch.bfloat16 else 0)) * 15
    assert max(largest) <= per_step, "as after one step: it does not grow"
    assert max(largest[100:]) <= 1.5 * max(largest[:100])
    assert (true - received).abs().max().item() <= 1.01 * per_step


@pytest.mark.parametrize("codec", LOSSY)
def test_a_flush_brings_the_true_sum_and_leaves_nothing(codec: str) -> None:
    ranks = VirtualRanks(codec, 3, (1, 2, 0))
    batches = [masked(3, 1000, 1.0, seed) for seed in range(5)]
    received = sum(ranks.reduce(gradients) for gradients in batches[:-1]) + ranks.reduce(batches[-1], flush=True)
    true = sum(dense_sum(gradients) for gradients in batches)
    assert (received - true).abs().max().item() < 1e-5
    assert all(not feedback_codec(ranks, rank).residuals()["weight"].any() for rank in range(3))


@pytest.mark.parametrize("codec", LOSSY)
def test_residuals_follow_their_parameter_into_other_buckets_and_other_owners(codec: str) -> None:
    ranks = VirtualRanks(codec, 2, (1, 3))
    shapes = {"a": (700,), "b": (20, 30), "c": (5,)}
    names = list(shapes)
    gradients = {rank: masked(1, 1305, 1.0, rank)[0].split([700, 600, 5]) for rank in range(2)}
    received = dict(
        zip(
            names,
            ranks.reduce([torch.cat(gradients[rank]) for rank in range(2)], shapes).split([700, 600, 5]),
            strict=True,
        )
    )
    ranks.shares = (2, 1)
    for number, keys in enumerate((["c", "b"], ["a"])):
        zeros = [torch.zeros(sum(torch.Size(shapes[key]).numel() for key in keys))] * 2
        summed = ranks.reduce(zeros, {key: shapes[key] for key in keys}, number=number, flush=True)
        for key, part in zip(keys, summed.split([torch.Size(shapes[key]).numel() for key in keys]), strict=True):
            received[key] = received[key] + part
    for index, key in enumerate(names):
        assert (received[key] - gradients[0][index] - gradients[1][index]).abs().max().item() < 1e-6


@pytest.mark.parametrize("codec", LOSSY)
def test_saved_residuals_go_on_where_they_were(codec: str) -> None:
    first, second = VirtualRanks(codec, 2), VirtualRanks(codec, 2)
    one, two = masked(2, 900, 1.0, 1), masked(2, 900, 1.0, 2)
    first.reduce(one)
    for rank in range(2):
        feedback_codec(second, rank).load_residuals(feedback_codec(first, rank).residuals())
    assert same_bits(first.reduce(two), second.reduce(two))
    feedback_codec(second, 0).load_residuals({"weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="the residual of weight has 3 numbers, the parameter 900: it is of another"):
        second.reduce(two)


@pytest.mark.parametrize("codec", NARROW)
def test_a_step_that_fails_leaves_the_residuals_as_they_were(codec: str) -> None:
    ranks = VirtualRanks(codec, 2)
    ranks.reduce(masked(2, 900, 1.0, 1))
    before = feedback_codec(ranks, 0).residuals()["weight"].clone()
    bucket = BucketView(0, masked(1, 900, 1.0, 2)[0], make_parts({"weight": (900,)}))
    for num_collectives in (1, 2):
        leg = ranks.codecs[0].reduce(bucket, Member(0, 2))
        for _ in range(num_collectives):
            next(leg)
        leg.close()
        assert torch.equal(feedback_codec(ranks, 0).residuals()["weight"], before)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1e12, 1e37])
@pytest.mark.parametrize("codec", NARROW)
def test_lossy_codecs_keep_their_precision_at_any_scale(codec: str, scale: float) -> None:
    gradients = [each.clamp(-3, 3) * scale for each in masked(2, 1024, 1.0, 7)]
    ranks = VirtualRanks(codec, 2)
    received = sum(ranks.reduce(gradients).double() for _ in range(20))
    true = 20 * dense_sum([each.double() for each in gradients])
    bound = 9 * PER_NUMBER[codec] * scale if scale > 1e-37 else math.inf
    assert isinstance(received, torch.Tensor)
    assert received.isfinite().all()
    assert (received - true).abs().max().item() <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shares", [(), (1, 2, 0)])
@pytest.mark.parametrize("codec", CODECS)
def test_codecs_sum_on_a_gpu_as_on_the_cpu(codec: str, shares: tuple[float, ...]) -> None:
    there, here, shapes = VirtualRanks(codec, 3, shares), VirtualRanks(codec, 3, shares), {"table": (1000, 5)}
    for step in range(3):
        gradients = masked(3, 5000, 0.05, step)
        summed = there.reduce([each.cuda() for each in gradients], shapes).cpu()
        assert torch.allclose(summed, here.reduce(gradients, shapes), rtol=1e-6, atol=1e-6)


def test_owners_have_ranges_in_proportion_to_their_shares() -> None:
    ranges = owned_ranges(10_000, Member(0, 4, (5, 0, 1, 4)), 10)
    assert [tuple(each) for each in ranges] == [(0, 5000), (5000, 5000), (5000, 6000), (6000, 10_000)]
    assert [each.length for each in owned_ranges(7, Member(0, 3))] == [2, 3, 2]
    assert [each.length for each in owned_ranges(7, Member(0, 3), 4)] == [4, 0, 3]
    with pytest.raises(ValueError, match="one for each, none negative, not all 0"):
        owned_ranges(7, Member(0, 3, (1, 1)))
    with pytest.raises(ValueError, match="one for each, none negative, not all 0"):
        owned_ranges(7, Member(0, 2, (0, 0)))


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.252), ("fp16", 0.5001), ("bf16", 0.5001), ("none", 1.0)])
def test_ranks_send_as_many_bytes_as_the_type_needs(codec: str, share: float) -> None:
    num_ranks, length = 4, 1 << 16
    shares = (1,) * num_ranks
    leg = exchange_codec(codec).reduce(
        BucketView(0, torch.zeros(length), make_parts({"weight": (length,)})), Member(1, num_ranks, shares)
    )
    sent = 0
    for asked in leg:
        assert isinstance(asked, Trade)
        asked.received.zero_()
        sizes = [size for rank, size in enumerate(asked.sent_sizes) if rank != 1]
        sent += sum(sizes) * asked.sent.element_size()
    ring = 2 * (num_ranks - 1) / num_ranks * 4 * length
    assert sent / ring == pytest.approx(share, rel=0.01)


def _ask(*collectives: Sum | Union | Largest | Trade) -> Leg:
    yield from collectives


def test_ranks_that_ask_for_different_collectives_are_told_apart() -> None:
    def numbers(length: int = 3) -> torch.Tensor:
        return torch.zeros(length)

    with pytest.raises(RuntimeError, match=r"different collectives: \['Sum', 'Largest'\]"):
        run_alike([_ask(Sum(numbers())), _ask(Largest(numbers()))])
    with pytest.raises(RuntimeError, match="different shapes or types"):
        run_alike([_ask(Sum(numbers())), _ask(Sum(numbers(4)))])
    with pytest.raises(RuntimeError, match=r"ranks \[1\] ended before the others"):
        run_alike([_ask(Sum(numbers())), _ask()])
    with pytest.raises(RuntimeError, match=r"rank 0 sends 2 torch.float32 to rank 1, which expects 1"):
        run_alike(
            [_ask(Trade(numbers(2), numbers(3), [1, 1], [1, 2]))] * 1
            + [_ask(Trade(numbers(2), numbers(3), [1, 1], [1, 2]))]
        )


def test_collectives_of_virtual_ranks_do_what_they_say() -> None:
    sums = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, -2.0])]
    bits = [torch.tensor([1, 4], dtype=torch.uint8), torch.tensor([2, 4], dtype=torch.uint8)]
    tops = [torch.tensor([1.0, -7.0]), torch.tensor([0.5, -6.0])]
    received = [torch.zeros(1), torch.zeros(5)]
    run_alike(
        [
            _ask(Sum(sums[0]), Union(bits[0]), Largest(tops[0]), Trade(received[0], torch.arange(3.0), [1, 0], [1, 2])),
            _ask(Sum(sums[1]), Union(bits[1]), Largest(tops[1]), Trade(received[1], torch.arange(3.0), [2, 3], [0, 3])),
        ]
    )
    assert [each.tolist() for each in sums] == [[11.0, 0.0]] * 2
    assert [each.tolist() for each in bits] == [[3, 4]] * 2
    assert [each.tolist() for each in tops] == [[1.0, -6.0]] * 2
    assert [each.tolist() for each in received] == [[0.0], [1.0, 2.0, 0.0, 1.0, 2.0]]


class _HalfCodec:
    name = "half"
    is_lossless = False

    def reduce(self, bucket: BucketView, _member: Member) -> Leg:
        yield Sum(bucket.flat)


class ForeignExchange(_HalfCodec):
    """A codec of another package."""

    name = "foreign"
    is_lossless = True


def test_a_codec_of_another_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        tmp_path,
        "foreign",
        "dynamix.exchange_codecs",
        foreign=f"{__name__}:ForeignExchange",
        half=f"{__name__}:_HalfCodec",
    )
    monkeypatch.syspath_prepend(tmp_path)
    one, other = exchange_codec("foreign"), exchange_codec("foreign")
    assert one is not other, "a codec per model"
    assert one.name == "foreign"
    with pytest.raises(ExtensionError, match=r"_HalfCodec has a loss but no error feedback: it needs residuals"):
        exchange_codec("half")
    with pytest.raises(ValueError, match=r"exchange codec 'int9' is unknown.*did you mean int8"):
        exchange_codec("int9")
