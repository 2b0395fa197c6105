"""A codec as DDP's communication hook: the backward pass waits for each bucket's sum."""

from collections.abc import Mapping

import torch
from bench.exchange.arms import codec_of, run_leg
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.exchange.codec import BucketPart, BucketView


class CodecHook:
    """Averages gradients over ranks, as DDP does without a hook; for one model."""

    def __init__(self, arm: str, model: torch.nn.Module) -> None:
        self._codec, self._member = codec_of(arm)
        self._names: Mapping[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}

    def register(self, model: DistributedDataParallel) -> None:
        """Let it sum a DDP model's gradients from now on."""
        model.register_comm_hook(self, _average)

    def average(self, bucket: GradBucket) -> Tensor:
        """Divide, then sum, which is DDP's own order."""
        flat = bucket.buffer().div_(self._member.world_size)
        view = BucketView(bucket.index(), flat, self._parts(bucket))
        run_leg(self._codec.reduce(view, self._member))
        return flat

    def _parts(self, bucket: GradBucket) -> tuple[BucketPart, ...]:
        parts, start = [], 0
        for parameter in bucket.parameters():
            stop = start + parameter.numel()
            parts.append(BucketPart(self._names[id(parameter)], start, stop, parameter.shape))
            start = stop
        return tuple(parts)


def _average(hook: CodecHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(hook.average(bucket))
    return done
