"""Ways to sum a gradient over ranks: PyTorch's own, and the trainer's codecs in the trainer's pipeline."""

from collections.abc import Callable

import torch.distributed as dist
from bench.exchange.gradients import buckets_of, sparse_of
from bench.exchange.plan import ALL_REDUCE, TORCH_SPARSE, Case, RankPlan
from torch import Tensor

from dynamix.trainer.communication.pipeline import Pipeline
from dynamix.trainer.exchange.codec import ExchangeCodec, Member
from dynamix.trainer.exchange.registry import exchange_codec

Exchange = Callable[[], Tensor]
"""Sums what it was prepared with, and returns the sum: dense, or torch's sparse tensor."""
Prepare = Callable[[Tensor], Exchange]
"""Takes a flat gradient, which may be overwritten; its own time is not measured."""


def arm_named(name: str, case: Case, plan: RankPlan, pipeline: Pipeline) -> Prepare:
    """A new arm; a codec keeps what it learns from exchange to exchange."""
    if name == ALL_REDUCE:
        return _all_reduce
    if name == TORCH_SPARSE:
        return lambda flat: _all_reduce(sparse_of(flat, case.width))
    codec, member = codec_of(name)

    def prepare(flat: Tensor) -> Exchange:
        def exchange() -> Tensor:
            legs = [codec.reduce(bucket, member) for bucket in buckets_of(flat, case.width, plan.num_buckets)]
            for under_way in [pipeline.send(leg) for leg in legs]:
                under_way.wait()
            return flat

        return exchange

    return prepare


def codec_of(name: str) -> tuple[ExchangeCodec, Member]:
    """A new codec, and this rank as it runs it: `NAME`, or `NAME@shares` over owners with equal shares."""
    codec_name, _, route = name.partition("@")
    world_size = dist.get_world_size()
    return exchange_codec(codec_name), Member(dist.get_rank(), world_size, (1.0,) * world_size if route else ())


def _all_reduce(tensor: Tensor) -> Exchange:
    def exchange() -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    return exchange
