"""The exchange of one model: its codecs by name, each made when it first rules and kept with what it learned."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dynamix.schemas.messages.allocation import SERVERS, Exchange
from dynamix.schemas.owner_shares import balanced_shares
from dynamix.trainer.exchange.codec import (
    BucketView,
    CodedSquares,
    ErrorFeedbackCodec,
    ExchangeCodec,
    MeasuredCodec,
    Member,
    RevocableCodec,
)
from dynamix.trainer.exchange.collectives import Leg, Sum
from dynamix.trainer.exchange.owners import legs_of
from dynamix.trainer.exchange.registry import exchange_codec

from .pipeline import Pipeline, UnderWay


class StepExchange(NamedTuple):
    """How gradients travel in one step."""

    exchange: Exchange
    flushes: bool = False
    """Whether another codec, or none, rules the next step: then residuals travel with this step's gradient."""


class ModelExchange:
    """Sends the buckets of one model as the ruling exchange says."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        keys: Mapping[Tensor, str],
        pipeline: Callable[[], Pipeline],
        num_servers: int = 0,
    ) -> None:
        """`keys` names the parameters; `pipeline` is asked for whenever something is sent."""
        self.keys = keys
        self._rank = rank
        self._world_size = world_size
        self._num_servers = num_servers
        self._pipeline = pipeline
        self._codecs: dict[str, ExchangeCodec] = {}
        self._ruling: StepExchange | None = None
        self._member = Member(rank, world_size)

    def begin(self, ruling: StepExchange) -> None:
        """Let an exchange rule the buckets that follow, of a new step."""
        for codec in self._revocable():
            codec.begin_step()
        if self._ruling is None or ruling.exchange != self._ruling.exchange:
            self._member = member_of(ruling.exchange, self._rank, self._world_size, self._num_servers)
        self._ruling = ruling

    @property
    def is_local(self) -> bool:
        """Whether what was sent last is how far parameters moved, and no gradient."""
        return self._ruling is not None and self._ruling.exchange.every > 1

    def send(self, bucket: BucketView) -> "UnderWay | ChunksUnderWay | HostCopy":
        """Begin to sum a bucket over ranks, in place; all ranks send the same buckets in the same order."""
        assert self._ruling is not None, "no exchange rules"
        codec = self._codec(self._ruling.exchange.codec)
        copied = HostCopy(bucket.flat) if bucket.flat.is_cuda else None
        if copied is not None:
            bucket = bucket._replace(flat=copied.host)
        if self._ruling.flushes and isinstance(codec, ErrorFeedbackCodec):
            legs = [codec.flush(bucket, self._member)]
        else:
            legs = legs_of(codec, bucket, self._member)
        sent = [self._pipeline().send(leg) for leg in legs]
        under_way = sent[0] if len(sent) == 1 else ChunksUnderWay(sent)
        if copied is None:
            return under_way
        copied.under_way = under_way
        return copied

    def send_plainly(self, numbers: Tensor) -> "UnderWay | HostCopy":
        """Begin to add up numbers over ranks, in place and without a codec, behind the buckets sent so far."""
        if not numbers.is_cuda:
            return self._pipeline().send(_sum(numbers))
        copied = HostCopy(numbers)
        copied.under_way = self._pipeline().send(_sum(copied.host))
        return copied

    def coded(self) -> CodedSquares:
        """How much of what was to be sent codecs with loss have sent."""
        found = CodedSquares()
        for codec in list(self._codecs.values()):
            if isinstance(codec, MeasuredCodec):
                found = found.and_more(codec.coded())
        return found

    def undo_step(self) -> None:
        """Have the residuals again that the newest step began with: its gradient is thrown away."""
        for codec in self._revocable():
            codec.undo_step()

    def scale_residuals(self, factor: float) -> None:
        """Multiply all residuals: gradients will be larger by this factor."""
        for codec in self._revocable():
            codec.scale_residuals(factor)

    def _revocable(self) -> list[RevocableCodec]:
        return [codec for codec in self._codecs.values() if isinstance(codec, RevocableCodec)]

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """What the sums lack so far on this rank, by codec and parameter; copies on the CPU."""
        lossy = {name: codec for name, codec in self._codecs.items() if isinstance(codec, ErrorFeedbackCodec)}
        found = {name: codec.residuals() for name, codec in lossy.items()}
        copied = {name: {key: each.cpu().clone() for key, each in parts.items()} for name, parts in found.items()}
        return {name: parts for name, parts in copied.items() if any(bool(each.any()) for each in parts.values())}

    def load_residuals(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `residuals` returned."""
        for name, parts in saved.items():
            codec = self._codec(name)
            if isinstance(codec, ErrorFeedbackCodec):
                codec.load_residuals(parts)

    def _codec(self, name: str) -> ExchangeCodec:
        if name not in self._codecs:
            self._codecs[name] = exchange_codec(name)
        return self._codecs[name]


def member_of(exchange: Exchange, rank: int, world_size: int, num_servers: int = 0) -> Member:
    """This rank in an exchange: without a route over owners it has no shares."""
    if exchange.route == SERVERS:
        shares = exchange.shares or balanced_shares((1.0,) * world_size, (1.0,) * num_servers)
        return Member(rank, world_size, shares, num_servers)
    if exchange.route != "shares":
        return Member(rank, world_size)
    return Member(rank, world_size, exchange.shares or (1.0,) * world_size)


def _sum(numbers: Tensor) -> Leg:
    yield Sum(numbers)


class ChunksUnderWay(NamedTuple):
    """A bucket that travels in chunks."""

    chunks: list[UnderWay]

    def wait(self) -> None:
        """Return when all are summed. Raises as `UnderWay.wait`."""
        for chunk in self.chunks:
            chunk.wait()


class HostCopy:
    """A bucket of a GPU on its way through the memory of its host: codecs compute there, and gloo sends from there."""

    def __init__(self, flat: Tensor) -> None:
        """Copy the bucket, once the device has computed it."""
        self._flat = flat
        self.host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
        self.under_way: UnderWay | ChunksUnderWay | None = None

    def wait(self) -> None:
        """Put the sum into the bucket, once it is there. Raises as `UnderWay.wait`."""
        assert self.under_way is not None, "not sent"
        self.under_way.wait()
        self._flat.copy_(self.host)
