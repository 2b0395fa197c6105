"""Virtual exchange: the codecs of all ranks of a job, in one process, on the gradient of each rank."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Exchange
from dynamix.trainer.communication.job_exchange import keeps_residuals
from dynamix.trainer.communication.model_exchange import member_of
from dynamix.trainer.exchange.codec import (
    BucketView,
    CodedSquares,
    ErrorFeedbackCodec,
    ExchangeCodec,
    MeasuredCodec,
    Member,
)
from dynamix.trainer.exchange.collectives import Leg
from dynamix.trainer.exchange.owners import chunks_of
from dynamix.trainer.exchange.registry import exchange_codec

from .layout import GradientLayout
from .stacked import STACKED, StackedInt8
from .traffic import BucketTraffic, CodedAs, CollectiveTraffic, StepTraffic, run_counted


class RuledStep(NamedTuple):
    """How the gradients of one step travel."""

    exchange: Exchange
    following: Exchange
    """What rules the next step, which all ranks know by now."""

    @property
    def is_local(self) -> bool:
        """Whether the step updates each rank's own parameters."""
        return self.exchange.every > 1


class VirtualExchange:
    """Sums the gradients of virtual ranks as real ranks would, and counts what they would send."""

    def __init__(self, model: nn.Module, world_size: int, *, num_buckets: int, gradient_bytes: int) -> None:
        """Let a gradient count as many bytes as it pretends to have."""
        self._gradients = GradientLayout(model, num_buckets)
        self._moves = GradientLayout(model, num_buckets, forwards=True)
        self.world_size = world_size
        self._gradient_bytes = gradient_bytes
        self._codecs: dict[str, list[ExchangeCodec]] = {}
        self._stacked: dict[tuple[bool, int], StackedInt8] = {}
        """By whether parameters moved, and the bucket's number."""

    def coded(self) -> CodedSquares:
        """How much of what was to be sent codecs with loss have sent, of all ranks together."""
        found = CodedSquares()
        for stacked in self._stacked.values():
            found = found.and_more(stacked.coded)
        for codec in (each for of_ranks in self._codecs.values() for each in of_ranks):
            if isinstance(codec, MeasuredCodec):
                found = found.and_more(codec.coded())
        return found

    def sum_gradients(self, gradients: Tensor, step: RuledStep, total: Tensor) -> StepTraffic:
        """Write into `total` what the ranks make of their weighted gradients, the rows of `gradients`.

        Costs what N ranks code: N (N - 1) messages per bucket by codecs that send to owners, but not by `int8`.
        """
        return self._sum(gradients, step, total, self._gradients)

    def sum_moves(self, moves: Tensor, step: RuledStep, total: Tensor) -> StepTraffic:
        """The same of how far each rank's parameters moved in a round of local steps, weighted."""
        return self._sum(moves, step, total, self._moves)

    def sum_plainly(self, numbers: Tensor, total: Tensor) -> StepTraffic:
        """The same of anything as large as the model, as it is."""
        return self._sum(numbers, RuledStep(EXACT, EXACT), total, self._moves)

    def _sum(self, rows: Tensor, step: RuledStep, total: Tensor, layout: GradientLayout) -> StepTraffic:
        exchange, sent = step.exchange, layout.as_sent(rows)
        flushes = exchange.codec in LOSSY_CODECS and not keeps_residuals(exchange, step.following)
        members = [member_of(exchange, rank, self.world_size) for rank in range(self.world_size)]
        factor = self._gradient_bytes / (layout.num_elements * sent.element_size())
        coded_as = EXACT.codec if flushes else exchange.codec
        buckets: list[BucketTraffic] = []
        with torch.inference_mode():
            for number, bucket in enumerate(layout.buckets):
                rows = sent[:, bucket.start : bucket.stop]
                views = [BucketView(number, row, bucket.parts) for row in rows.unbind()]
                if exchange.codec == STACKED:
                    stacked = self._stacked.setdefault((layout is self._moves, number), StackedInt8())
                    seen = self._sum_stacked(stacked, rows, views, members, flushes=flushes)
                else:
                    seen = self._sum_bucket(exchange.codec, views, members, flushes=flushes)
                coded = CodedAs(coded_as, factor * views[0].flat.nbytes)
                travelled = BucketTraffic(_pretended(seen, members[0], factor), coded)
                buckets += travelled.in_chunks(_num_chunks(exchange, views[0], coded.gradient_bytes))
            layout.as_model(sent[0], total)
        return StepTraffic(tuple(buckets))

    def _sum_bucket(
        self, codec: str, views: Sequence[BucketView], members: Sequence[Member], *, flushes: bool = False
    ) -> tuple[CollectiveTraffic, ...]:
        of_ranks = zip(self._codecs_of(codec), views, members, strict=True)
        return run_counted([_leg(*each, flushes=flushes) for each in of_ranks])

    def _sum_stacked(
        self,
        stacked: StackedInt8,
        rows: Tensor,
        views: Sequence[BucketView],
        members: Sequence[Member],
        *,
        flushes: bool,
    ) -> tuple[CollectiveTraffic, ...]:
        if self.world_size == 1:
            return ()
        if flushes:
            stacked.take_residuals(rows)
            return self._sum_bucket(EXACT.codec, views, members)
        seen, is_finite = stacked.reduce(rows, members[0])
        return seen if is_finite else seen + self._sum_bucket(EXACT.codec, views, members)

    def _codecs_of(self, name: str) -> list[ExchangeCodec]:
        """One per rank."""
        if name not in self._codecs:
            self._codecs[name] = [exchange_codec(name) for _ in range(self.world_size)]
        return self._codecs[name]


def _num_chunks(exchange: Exchange, view: BucketView, num_bytes: float) -> int:
    """Chunks of a bucket that counts so many bytes; the sum has the same bits in one piece."""
    return len(chunks_of(view, num_bytes)) if exchange.route == "shares" and exchange.codec == EXACT.codec else 1


def _pretended(seen: tuple[CollectiveTraffic, ...], member: Member, factor: float) -> tuple[CollectiveTraffic, ...]:
    """What was counted, of a gradient that is larger by a factor than the model's.

    Owners own whole blocks, which of a small model are few, so that some own twice as much as others; where a larger
    one is pretended, its owners own what they should.
    """
    if factor == 1.0 or member.world_size < 2:
        return seen
    shares = np.array(member.shares or (1.0,) * member.world_size)
    is_push, found = True, []
    for each in seen:
        scaled = each.scaled(factor)
        found.append(scaled if each.is_ring else scaled.dealt(shares / shares.sum(), is_push=is_push))
        is_push = is_push if each.is_ring else not is_push
    return tuple(found)


def _leg(codec: ExchangeCodec, view: BucketView, member: Member, *, flushes: bool) -> Leg:
    if flushes and isinstance(codec, ErrorFeedbackCodec):
        return codec.flush(view, member)
    return codec.reduce(view, member)
