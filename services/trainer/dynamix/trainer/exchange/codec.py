"""Exchange codecs: the collectives that they yield, their contract, the sum at owners, and the residuals of rounding.

A codec sums buckets of gradients over ranks, as a generator of collectives; a communication thread, or the virtual
cluster (`run_alike`), carries out what it yields, in place, and resumes it. All ranks run the same codec on the same
buckets in the same order, so a codec decides from what collectives brought, never from its own gradient alone. Write
`reduce`; a codec that rounds derives from `ErrorFeedback`.

With shares s a rank owns about s_r / sum(s) of the elements, in one range. All ranks push their addends to the owners,
and pull the sums back: a slow link that owns less carries less. Gradient servers are owners behind the ranks.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Size, Tensor


class Sum(NamedTuple):
    """All-reduce: the tensor becomes the sum over ranks, the same bits on each."""

    tensor: Tensor


class Union(NamedTuple):
    """All-reduce: the tensor, of uint8, becomes the bitwise OR over ranks."""

    tensor: Tensor


class Largest(NamedTuple):
    """All-reduce: the tensor becomes the maximum over ranks, by element."""

    tensor: Tensor


class Trade(NamedTuple):
    """All-to-all: rank r's piece of `sent` goes to rank r, and what came from it is its piece of `received`.

    Pieces lie behind each other in rank order, in elements of the first dimension; both tensors are contiguous and of
    one type. A piece may be empty. Behind those of the ranks are those of the gradient servers, if they take part.
    """

    received: Tensor
    sent: Tensor
    received_sizes: list[int]
    sent_sizes: list[int]
    served_sizes: tuple[int, ...] = ()
    """Elements that each gradient server gets from every rank, if servers take part."""
    served_sum: int = 0
    """Number of the servers' sum: the same where they receive its pieces and where they return it."""
    is_answer: bool = False
    """Whether servers return a sum."""


Collective = Sum | Union | Largest | Trade
Leg = Generator[Collective, None, None]
"""A generator of collectives; each is complete when the generator continues."""


def just(collective: Collective) -> Leg:
    """A generator of one collective."""
    yield collective


HALF_TYPES = (torch.float16, torch.bfloat16)
MOST_CHUNKS = 8
"""Most chunks of a bucket; sending the first one to its owner and the last one back overlaps with nothing."""
LEAST_CHUNK_BYTES = 64 * 1024
"""Each chunk costs 4 (N - 1) messages."""


class Member(NamedTuple):
    """A rank of the job, and who owns how much of a bucket."""

    rank: int
    world_size: int
    shares: tuple[float, ...] = ()
    """Shares of ranks, then of servers, at least one above 0; empty for the all-reduce. A codec that always needs
    owners takes equal shares then."""
    num_servers: int = 0
    """Gradient servers, which own parts of a bucket too, and have no gradient."""


class BucketPart(NamedTuple):
    """Position of one parameter's gradient in a bucket."""

    key: str
    """The parameter's name, the same in every bucket and on every rank: DDP makes its buckets again after a step."""
    start: int
    stop: int
    shape: Size


class BucketView(NamedTuple):
    """A bucket of gradients on its way: this rank's addend, and in the end the sum over ranks."""

    number: int
    """Among the buckets of the model."""
    flat: Tensor
    """One dimension, contiguous, float64, float32, bfloat16 or float16; the codec writes the sum into it."""
    parts: tuple[BucketPart, ...]
    """In order; together they cover all of `flat`. The tuple stays the same until buckets are made again."""


class CodedSquares(NamedTuple):
    """Squared norms of some messages, summed: the gradient and residual that were to be sent, and what was sent."""

    wanted: float = 0.0
    sent: float = 0.0

    def and_more(self, others: "CodedSquares") -> "CodedSquares":
        """Both together."""
        return CodedSquares(self.wanted + others.wanted, self.sent + others.sent)

    def since(self, before: "CodedSquares") -> "CodedSquares":
        """The difference to an earlier value."""
        return CodedSquares(self.wanted - before.wanted, self.sent - before.sent)


@runtime_checkable
class ExchangeCodec(Protocol):
    """Sums the buckets of one model; it may keep what it learned of them."""

    name: str
    is_lossless: bool
    """Whether the sum equals that of the all-reduce, up to rounding by another order of additions."""

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Make `bucket.flat` the sum over ranks, with the same bits on every rank; nothing else of it is changed.

        The generators of several buckets may be under way at a time, in different threads: their first collectives in
        the order of the buckets, and the later ones in the same order. One that fails, or is dropped, leaves the codec
        as it was before.
        """


def owned_ranges(num_elements: int, member: Member, block: int = 1) -> list[range]:
    """The elements that each rank and then each server owns: whole blocks; only the last may end with a part of one."""
    num_owners = member.world_size + member.num_servers
    shares = member.shares or (1.0,) * num_owners
    if len(shares) != num_owners or min(shares) < 0 or not sum(shares) > 0:
        raise ValueError(f"shares {shares} for {num_owners} owners: one for each, none negative, not all 0")
    num_blocks = -(-num_elements // block)
    ends, so_far, total = [0], 0.0, sum(shares)
    for share in shares:
        so_far += share
        ends.append(min(round(so_far / total * num_blocks) * block, num_elements))
    ends[-1] = num_elements
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


_served_sums = itertools.count()


def sum_over_ranks(tensor: Tensor, member: Member) -> Leg:
    """Sum a flat tensor over ranks by the member's route, at owners in rank order."""
    if member.world_size == 1:
        return
    if not member.shares:
        yield Sum(tensor)
        return
    lengths = [len(each) for each in owned_ranges(len(tensor), member)]
    mine = [lengths[member.rank]] * member.world_size
    served = tuple(lengths[member.world_size :]), next(_served_sums)
    from_all = [*mine, *[0] * member.num_servers]
    addends = tensor.new_empty(sum(mine))
    yield Trade(addends, tensor, from_all, lengths, *served)
    total = sum_in_rank_order(list(torch.split(addends, mine)))
    yield Trade(tensor, total.repeat(member.world_size), lengths, from_all, *served, is_answer=True)


def sum_together(tensors: Sequence[Tensor], member: Member) -> Leg:
    """Sum some flat tensors over ranks in place, all at equal owners."""
    flat = torch.cat(list(tensors))
    yield from sum_over_ranks(flat, Member(member.rank, member.world_size, (1.0,) * member.world_size))
    for tensor, total in zip(tensors, torch.split(flat, [len(each) for each in tensors]), strict=True):
        tensor.copy_(total)


def side_by_side(*legs: Leg) -> Leg:
    """Carry out legs at the same time: their all-to-alls share messages."""
    while asked := [each for leg in legs if (each := next(leg, None)) is not None]:
        trades = [each for each in asked if isinstance(each, Trade) and not each.served_sizes]
        if len(trades) < len(legs):
            yield from asked
            continue
        # by rank, and of each rank by leg
        sent = list(zip(*(_pieces(trade.sent, trade.sent_sizes) for trade in trades), strict=True))
        places = list(zip(*(_pieces(trade.received, trade.received_sizes) for trade in trades), strict=True))
        message = torch.cat([piece for of_rank in sent for piece in of_rank])
        sizes = [len(place) for of_rank in places for place in of_rank]
        received = message.new_empty(sum(sizes))
        sent_sizes, received_sizes = ([sum(map(len, of_rank)) for of_rank in each] for each in (sent, places))
        yield Trade(received, message, received_sizes, sent_sizes)
        for place, piece in zip(itertools.chain(*places), torch.split(received, sizes), strict=True):
            place.copy_(piece)


def _pieces(tensor: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The bytes of each rank's elements."""
    return torch.split(tensor.view(torch.uint8), [size * tensor.element_size() for size in sizes])


def sum_in_rank_order(addends: list[Tensor]) -> Tensor:
    """The sum, one addend after the other, of half precision in float32; the first one is overwritten."""
    first, *others = addends
    total = first.float() if first.dtype in HALF_TYPES else first
    for addend in others:
        total.add_(addend)
    return total.to(first.dtype)


class PlainExchange:
    """The codec `none`: gradients as they are, by the all-reduce or to owners."""

    name = "none"
    is_lossless = True

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`."""
        return sum_over_ranks(bucket.flat, member)


def num_chunks(num_bytes: float) -> int:
    """Chunks of a bucket of this size: while the sum of one comes back, the next one is sent."""
    return min(MOST_CHUNKS, max(1, int(num_bytes // LEAST_CHUNK_BYTES)))


def chunks_of(codec: ExchangeCodec, bucket: BucketView, member: Member) -> list[BucketView]:
    """A bucket as it is summed; plain gradients are sent to ranks in chunks.

    Chunks to gradient servers were slower than whole buckets (docs/communication.md).
    """
    if isinstance(codec, PlainExchange) and member.shares and not member.num_servers:
        chunks = torch.tensor_split(bucket.flat, num_chunks(bucket.flat.nbytes))
        return [bucket._replace(flat=flat, parts=()) for flat in chunks]
    return [bucket]


class Residuals:
    """Residuals: one flat tensor per parameter with what a rank has not sent yet of its gradients.

    DDP makes its buckets again after the first step, and a checkpoint knows no buckets, so a residual belongs to its
    parameter. Within a bucket residuals lie behind each other, as the gradients do: adding them is one operation.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Tensor] = {}
        self._laid_out: dict[int, tuple[tuple[BucketPart, ...], Tensor]] = {}

    def of(self, bucket: BucketView) -> Tensor:
        """The residuals of a bucket, in its layout; not to be changed.

        Raises:
            ValueError: when a parameter has another size than before.
        """
        parts, flat = self._laid_out.get(bucket.number, (None, None))
        if flat is not None and (parts is bucket.parts or parts == bucket.parts) and flat.device == bucket.flat.device:
            return flat
        if flat is not None:
            self._laid_out.clear()  # all buckets are made again: one of the old layout would keep a dead copy
        is_double = bucket.flat.dtype == torch.float64
        flat = bucket.flat.new_zeros(len(bucket.flat), dtype=torch.float64 if is_double else torch.float32)
        for part in bucket.parts:
            place = flat[part.start : part.stop]
            known = self._by_key.get(part.key)
            if known is not None:
                if known.shape != place.shape:
                    raise ValueError(
                        f"the residual of {part.key} has {len(known)} numbers, the parameter {len(place)}: it is of "
                        "another model; load a checkpoint of this one, or none"
                    )
                place.copy_(known)
            self._by_key[part.key] = place
        self._laid_out[bucket.number] = (bucket.parts, flat)
        return flat

    def put(self, bucket: BucketView, flat: Tensor) -> None:
        """Keep these from now on, instead of what `of` returned."""
        self._laid_out[bucket.number] = (bucket.parts, flat)
        self._by_key.update((part.key, flat[part.start : part.stop]) for part in bucket.parts)

    def flush(self, bucket: BucketView, member: Member) -> Leg:
        """Sum a bucket and its residuals without loss; then there are no residuals."""
        residual = self.of(bucket)
        bucket.flat.add_(residual)
        yield from sum_over_ranks(bucket.flat, member)
        self.put(bucket, torch.zeros_like(residual))

    def by_key(self) -> dict[str, Tensor]:
        """All, by parameter's key. Views: copy what is to be kept."""
        return dict(self._by_key)

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of these."""
        self._laid_out.clear()
        self._by_key = {key: each.detach().flatten().clone() for key, each in residuals.items()}


class ErrorFeedback:
    """Base of codecs that round: what a step's sum lacks is added to the next step's gradient."""

    is_lossless = False

    def __init__(self) -> None:
        self.residuals = Residuals()
        """The residuals of this rank."""
        self.coded = CodedSquares()
        """Squared norms of what was sent and should have been sent, if the codec measures them."""


def leg_of(codec: ExchangeCodec, bucket: BucketView, member: Member, *, flushes: bool) -> Leg:
    """Sum a bucket; where it `flushes` and its residuals without loss."""
    if flushes and isinstance(codec, ErrorFeedback):
        return codec.residuals.flush(bucket, member)
    return codec.reduce(bucket, member)


def run_alike(legs: Sequence[Leg]) -> None:
    """Run the generators of all ranks of one process in lockstep, summing in rank order.

    Raises:
        RuntimeError: when ranks yield different collectives, which would hang or corrupt real ones.
    """
    while True:
        asked = [next(leg, None) for leg in legs]
        yielded = [each for each in asked if each is not None]
        if not yielded:
            return
        if len(yielded) < len(asked):
            raise RuntimeError(f"ranks {[r for r, each in enumerate(asked) if each is None]} ended before the others")
        perform_alike(yielded)


def perform_alike(asked: Sequence[Collective]) -> None:
    """Carry out one collective, given the request of each rank. Raises RuntimeError when they do not fit together."""
    trades = [each for each in asked if isinstance(each, Trade)]
    if len(trades) == len(asked):
        pieces = [torch.split(trade.sent, trade.sent_sizes) for trade in trades]
        for rank, trade in enumerate(trades):
            for source, place in enumerate(torch.split(trade.received, trade.received_sizes)):
                piece = pieces[source][rank]
                if (len(piece), piece.dtype) != (len(place), place.dtype):
                    raise RuntimeError(
                        f"Trade: rank {source} sends {len(piece)} {piece.dtype} to rank {rank}, which expects "
                        f"{len(place)} {place.dtype}"
                    )
                place.copy_(piece)
        return
    tensors = [each.tensor for each in asked if not isinstance(each, Trade)]
    if len({(type(each), each[0].shape) for each in asked}) > 1:
        raise RuntimeError(f"ranks ask for different collectives: {[type(each).__name__ for each in asked]}")
    total = tensors[0].clone()
    combine: dict[type[Collective], Callable[..., Tensor]]
    combine = {Sum: torch.add, Union: torch.bitwise_or, Largest: torch.maximum}
    for tensor in tensors[1:]:
        combine[type(asked[0])](total, tensor, out=total)
    for tensor in tensors:
        tensor.copy_(total)
