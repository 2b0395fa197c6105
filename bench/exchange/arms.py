"""Ways to sum a gradient over ranks: PyTorch's own, and the trainer's codecs in the trainer's pipeline."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from bench.exchange.gradients import buckets_of, sparse_of
from bench.exchange.plan import ALL_REDUCE, TORCH_SPARSE, Case, RankPlan
from torch import Tensor

from dynamix.schemas.messages.allocation import SERVERS
from dynamix.schemas.owner_shares import balanced_shares
from dynamix.trainer.communication.gradient_servers import GradientServers
from dynamix.trainer.communication.pipeline import Pipeline
from dynamix.trainer.exchange.codec import ExchangeCodec, Member
from dynamix.trainer.exchange.owners import legs_of
from dynamix.trainer.exchange.registry import exchange_codec

SERVERS_VARIABLE = "BENCH_GRADIENT_SERVERS"
"""Their addresses, with commas between."""
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
    codec, member = codec_of(name, case.num_servers)

    def prepare(flat: Tensor) -> Exchange:
        def exchange() -> Tensor:
            buckets = buckets_of(flat, case.width, plan.num_buckets)
            legs = [leg for bucket in buckets for leg in legs_of(codec, bucket, member)]
            for under_way in [pipeline.send(leg) for leg in legs]:
                under_way.wait()
            return flat

        return exchange

    return prepare


def codec_of(name: str, num_servers: int) -> tuple[ExchangeCodec, Member]:
    """A new codec, and this rank as it runs it."""
    codec_name, _, route = name.partition("@")
    rank, equal = dist.get_rank(), (1.0,) * dist.get_world_size()
    if route == SERVERS:
        shares = balanced_shares(equal, (1.0,) * num_servers)
        return exchange_codec(codec_name), Member(rank, len(equal), shares, num_servers)
    return exchange_codec(codec_name), Member(rank, len(equal), equal if route else ())


def joined_pipeline(timeout: timedelta) -> Pipeline:
    """The pipeline of this rank, with the servers that its runner started; a collective."""
    addresses = [address for address in os.environ[SERVERS_VARIABLE].split(",") if address]
    servers = GradientServers(addresses, "bench-exchange", dist.get_rank(), dist.get_world_size())
    return Pipeline(timeout, servers)


def _all_reduce(tensor: Tensor) -> Exchange:
    def exchange() -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    return exchange
