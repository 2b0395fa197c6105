"""A codec as DDP's communication hook: buckets go through the trainer's pipeline, and the last one waits for all."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.communication.pipeline import Pipeline, UnderWay
from dynamix.trainer.exchange.codec import ExchangeCodec, Member
from dynamix.trainer.exchange.owners import legs_of
from dynamix.trainer.gradient.buckets import view_of


class CodecHook:
    """Averages gradients over ranks, as DDP does without a hook; for one model."""

    def __init__(self, codec: ExchangeCodec, member: Member, model: torch.nn.Module, pipeline: Pipeline) -> None:
        self._codec = codec
        self._member = member
        self._pipeline = pipeline
        self._keys: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._under_way: list[UnderWay] = []

    def register(self, model: DistributedDataParallel) -> None:
        """Let it sum a DDP model's gradients from now on."""
        model.register_comm_hook(self, _average)

    def average(self, bucket: GradBucket) -> Tensor:
        """Divide, then sum, which is DDP's own order; the last bucket of a step waits for all."""
        flat = bucket.buffer().div_(self._member.world_size)
        view = view_of(bucket, flat, self._keys)
        self._under_way += [self._pipeline.send(leg) for leg in legs_of(self._codec, view, self._member)]
        if bucket.is_last():
            while self._under_way:
                self._under_way.pop(0).wait()
        return flat


def _average(hook: CodecHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The sum's future, done from the beginning: DDP looks at it after the last bucket's hook."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(hook.average(bucket))
    return done
