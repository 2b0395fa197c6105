"""Virtual exchange: the codecs of all ranks of a job, in one process, on the gradient of each rank."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.schemas.messages.allocation import EXACT, LOSSY_CODECS, Exchange
from dynamix.trainer.communication.model_exchange import member_of
from dynamix.trainer.exchange.codec import BucketView, ErrorFeedbackCodec, ExchangeCodec, Member
from dynamix.trainer.exchange.collectives import Leg
from dynamix.trainer.exchange.registry import exchange_codec

from .layout import GradientLayout
from .traffic import BucketTraffic, CollectiveTraffic, StepTraffic, run_counted


class RuledStep(NamedTuple):
    """How the gradients of one step travel."""

    exchange: Exchange
    following: Exchange
    """What rules the next step, which all ranks know by now."""

    @property
    def is_last(self) -> bool:
        """Whether what this exchange has not sent yet must travel now: the next one is not of its kind."""
        now, then = self.exchange, self.following
        return now.codec != then.codec or (now.every > 1) != (then.every > 1)


class VirtualExchange:
    """Sums the gradients of virtual ranks as real ranks would, and counts what they would send."""

    def __init__(self, model: nn.Module, world_size: int, *, num_buckets: int, gradient_bytes: int) -> None:
        """Let a gradient count as many bytes as it pretends to have."""
        self._layout = GradientLayout(model, num_buckets)
        self._world_size = world_size
        self._gradient_bytes = gradient_bytes
        self._codecs: dict[str, list[ExchangeCodec]] = {}

    def sum_gradients(self, gradients: Tensor, step: RuledStep, total: Tensor) -> StepTraffic:
        """Write into `total` what the ranks make of their weighted gradients, the rows of `gradients`.

        Costs what N ranks code: N (N - 1) messages per bucket by codecs that send to owners.
        """
        exchange, sent = step.exchange, self._layout.as_sent(gradients)
        flushes = step.is_last and exchange.codec in LOSSY_CODECS
        members = [member_of(exchange, rank, self._world_size) for rank in range(self._world_size)]
        codecs = self._codecs_of(exchange.codec)
        buckets = []
        with torch.inference_mode():
            for number, bucket in enumerate(self._layout.buckets):
                views = [BucketView(number, row[bucket.start : bucket.stop], bucket.parts) for row in sent.unbind()]
                legs = [_leg(*of_rank, flushes=flushes) for of_rank in zip(codecs, views, members, strict=True)]
                buckets.append(self._traffic(run_counted(legs), views[0], members[0]))
            self._layout.as_model(sent[0], total)
        return StepTraffic(tuple(buckets), EXACT.codec if flushes else exchange.codec)

    def _traffic(self, seen: tuple[CollectiveTraffic, ...], view: BucketView, member: Member) -> BucketTraffic:
        """What was counted, of a gradient that is as large as it pretends to be.

        Owners own whole blocks, which of a small model are few, so that some own twice as much as others; where a
        larger one is pretended, its owners own what they should.
        """
        factor = self._gradient_bytes / (self._layout.num_elements * view.flat.element_size())
        if factor != 1.0 and self._world_size > 1:
            shares = np.array(member.shares or (1.0,) * self._world_size)
            is_push, dealt = True, []
            for each in seen:
                scaled = each.scaled(factor)
                dealt.append(scaled if each.is_ring else scaled.dealt(shares / shares.sum(), is_push=is_push))
                is_push = is_push if each.is_ring else not is_push
            seen = tuple(dealt)
        return BucketTraffic(seen, factor * view.flat.nbytes)

    def _codecs_of(self, name: str) -> list[ExchangeCodec]:
        """One per rank."""
        if name not in self._codecs:
            self._codecs[name] = [exchange_codec(name) for _ in range(self._world_size)]
        return self._codecs[name]


def _leg(codec: ExchangeCodec, view: BucketView, member: Member, *, flushes: bool) -> Leg:
    if flushes and isinstance(codec, ErrorFeedbackCodec):
        return codec.flush(view, member)
    return codec.reduce(view, member)
