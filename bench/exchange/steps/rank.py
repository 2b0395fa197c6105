"""One rank, on its host: `python -m bench.exchange.steps.rank JSON`, with torch's variables in the environment.

Every arm trains a model of its own, from the same weights on the same samples, a few steps in each round. Steps are
timed between barriers; the bytes are those of this rank's network namespace.
"""

import sys
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from bench.exchange.arms import codec_of, joined_pipeline
from bench.exchange.plan import ALL_REDUCE, TORCH_SPARSE
from bench.exchange.rank import TIMEOUT, ArmTimings, answer_cases, timed
from bench.exchange.steps.hook import CodecHook
from bench.exchange.steps.plan import StepsCase, StepsPlan
from bench.harness.rounds import Rounds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.lab.workloads import Data, Part, Workload, make_optimizer, workload_named
from dynamix.trainer.communication.pipeline import Pipeline

NUM_WARM_UP = 1
"""Rounds before those that are measured: DDP makes its buckets again behind the first step."""


class ArmTraining:
    """One arm's model."""

    def __init__(self, arm: str, workload: Workload, case: StepsCase, plan: StepsPlan, pipeline: Pipeline) -> None:
        torch.manual_seed(plan.seed)
        self._workload = workload
        self.model = workload.model()
        if arm == TORCH_SPARSE:
            for module in self.model.modules():
                if isinstance(module, nn.Embedding):
                    module.sparse = True
        self._trained = DistributedDataParallel(self.model)
        if arm not in (ALL_REDUCE, TORCH_SPARSE):
            CodecHook(*codec_of(arm, case.num_servers), self.model, pipeline).register(self._trained)
        self._optimizer = make_optimizer("sgd", self.model.parameters(), plan.learning_rate)

    def step(self, batch: Part) -> None:
        """One step on this rank's samples."""
        loss = self._workload.loss(self._trained(batch.inputs), batch.labels)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()

    def parameters(self) -> Tensor:
        """All in one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def run_case(case: StepsCase, plan: StepsPlan) -> dict[str, ArmTimings]:
    """All arms, in rounds whose order is the same on all ranks."""
    workload, data = workload_named(case.workload), _data(case.workload, plan.data)
    pipeline = joined_pipeline(TIMEOUT)
    arms = {name: ArmTraining(name, workload, case, plan, pipeline) for name in plan.arms}
    batches = {name: _batches(data.train, case, plan) for name in plan.arms}
    rounds = Rounds(plan.arms, plan.num_rounds, label="steps", num_warm_up=NUM_WARM_UP, is_quiet=True)
    for name in rounds:
        chosen = [next(batches[name]) for _ in range(plan.num_steps)]

        def train(arm: ArmTraining = arms[name], chosen: list[Part] = chosen) -> None:
            for batch in chosen:
                arm.step(batch)

        rounds.record(timed(train, num_items=plan.num_steps))
    pipeline.close()
    expected = arms[ALL_REDUCE].parameters()
    found = {}
    for name, timings in rounds.timings.items():
        parameters = arms[name].parameters()
        found[name] = ArmTimings(
            wall_s=[timing.wall_s for timing in timings],
            cpu_s=[timing.cpu_s for timing in timings],
            tx_bytes=[timing.num_bytes for timing in timings],
            digest=zlib.crc32(parameters.numpy().tobytes()),
            error=float((parameters - expected).abs().max() / expected.abs().max()),
        )
    return found


@cache
def _data(workload: str, directory: str | None) -> Data:
    return workload_named(workload).load(None if directory is None else Path(directory))


def _batches(part: Part, case: StepsCase, plan: StepsPlan) -> Iterator[Part]:
    """This rank's samples of step after step: one order for all ranks, begun again when it ends."""
    generator = torch.Generator().manual_seed(plan.seed)
    size, first = case.local_batch_size, case.local_batch_size * dist.get_rank()
    while True:
        order = torch.randperm(len(part.labels), generator=generator)
        for start in range(0, len(order) - size * case.num_ranks + 1, size * case.num_ranks):
            mine = order[start + first : start + first + size]
            yield Part(part.inputs[mine], part.labels[mine])


if __name__ == "__main__":
    answer_cases(sys.argv[1], StepsPlan, StepsCase, run_case)
