"""Ways to sum a gradient over ranks: PyTorch's own, and the trainer's codecs."""

from collections.abc import Callable

import torch.distributed as dist
from bench.exchange.gradients import bucket_of, sparse_of
from bench.exchange.plan import ALL_REDUCE, TORCH_SPARSE
from torch import Tensor

from dynamix.trainer.exchange.codec import ExchangeCodec, Member
from dynamix.trainer.exchange.collectives import Collective, Largest, Leg, Sum, Trade
from dynamix.trainer.exchange.registry import exchange_codec

Exchange = Callable[[], Tensor]
"""Sums what it was prepared with, and returns the sum: dense, or torch's sparse tensor."""
Prepare = Callable[[Tensor], Exchange]
"""Takes a flat gradient, which may be overwritten; its own time is not measured."""


def arm_named(name: str, width: int) -> Prepare:
    """A new arm; a codec keeps what it learns from exchange to exchange."""
    if name == ALL_REDUCE:
        return _all_reduce
    if name == TORCH_SPARSE:
        return lambda flat: _sparse_all_reduce(sparse_of(flat, width))
    codec, member = codec_of(name)

    def prepare(flat: Tensor) -> Exchange:
        def exchange() -> Tensor:
            run_leg(codec.reduce(bucket_of(flat, width), member))
            return flat

        return exchange

    return prepare


def codec_of(name: str) -> tuple[ExchangeCodec, Member]:
    """A new codec, and this rank as it runs it: `NAME`, or `NAME@shares` over owners with equal shares."""
    codec_name, _, route = name.partition("@")
    world_size = dist.get_world_size()
    return exchange_codec(codec_name), Member(dist.get_rank(), world_size, (1.0,) * world_size if route else ())


def run_leg(leg: Leg) -> None:
    """Carry out a codec's collectives, one after the other, by the default process group."""
    for collective in leg:
        _perform(collective)


def _perform(collective: Collective) -> None:
    if isinstance(collective, Trade):
        received, sent, received_sizes, sent_sizes = collective
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
        return
    operation = (
        dist.ReduceOp.SUM
        if isinstance(collective, Sum)
        else dist.ReduceOp.MAX
        if isinstance(collective, Largest)
        else dist.ReduceOp.BOR
    )
    dist.all_reduce(collective.tensor, operation)


def _all_reduce(flat: Tensor) -> Exchange:
    def exchange() -> Tensor:
        dist.all_reduce(flat)
        return flat

    return exchange


def _sparse_all_reduce(sparse: Tensor) -> Exchange:
    def exchange() -> Tensor:
        dist.all_reduce(sparse)
        return sparse

    return exchange
