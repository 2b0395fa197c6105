"""Jobs that train to a number of samples, for hours: kept every few minutes, so that a killed one goes on where it was.

Used by `bench.virtual` for the paper's models at their own size; those with convolutions compute in bfloat16. What is
kept of a job is its cluster, with weights and clock, and the reports so far: the arbitrator is told these again and
decides the same. A policy that decides as one before it did, action by action, takes the job of that one as its own.
"""
# ruff: noqa: SLF001 - a job is kept whole, private state and all

import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Self, cast

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import torch
from bench.harness import BenchmarkError
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dynamix.lab.comparison.runs import ComparisonCell, Ledger, RunTask, policy_of
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import RunOutcome, run_episode, workload_data
from dynamix.schemas.messages import Action, Report, Trace
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.gradient.learning_rate import correct_second_moments

KEPT_EVERY_S = 600.0
DATA = ("_data", "_evaluated", "_test")
COMPUTED_AT_ONCE = 128
"""Samples: more of them leave the cache."""
PATCHES_UP_TO = 4
"""Largest side of images whose convolution is a product of patches: that of oneDNN takes three times as long there."""


class PatchProduct(torch.autograd.Function):
    """A convolution of 3 x 3, padded by 1, as one matrix product; images are N x channels x side x side."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The patch of each pixel, as a row of 9 x channels numbers, times the weights."""
        num_images, channels, side, _ = images.shape
        padded = images.new_zeros(num_images, side + 2, side + 2, channels)
        padded[:, 1:-1, 1:-1] = images.permute(0, 2, 3, 1)
        patches = padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * channels)
        rows = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
        ctx.save_for_backward(patches, rows)
        ctx.padded_shape = padded.shape
        return torch.addmm(bias, patches, rows.t()).view(num_images, side, side, -1).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of images, weights and biases."""
        patches, rows = ctx.saved_tensors
        num_images, width, side, _ = gradient.shape
        outputs = gradient.permute(0, 2, 3, 1).reshape(-1, width)
        of_weight = (outputs.t() @ patches).view(width, 3, 3, -1).permute(0, 3, 1, 2)
        of_patches = (outputs @ rows).view(num_images, side, side, 3, 3, -1)
        of_images = outputs.new_zeros(ctx.padded_shape)
        for row, column in product(range(3), range(3)):
            of_images[:, row : row + side, column : column + side] += of_patches[:, :, :, row, column]
        return of_images[:, 1:-1, 1:-1].permute(0, 3, 1, 2), of_weight, outputs.sum(0)


class PatchConvolution(nn.Conv2d):
    """Computes small images by `PatchProduct`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As `nn.Conv2d`."""
        if input.shape[-1] > PATCHES_UP_TO:
            return super().forward(input)
        own = (tensor.to(torch.bfloat16) for tensor in (input, self.weight, cast("Tensor", self.bias)))
        found: Tensor = PatchProduct.apply(*own)  # type: ignore[no-untyped-call]
        return found


class ComputedInParts(nn.Module):
    """A model that computes some samples at once; one with convolutions in bfloat16.

    Parameters, loss and optimizer stay in float32 (torch's mixed precision). Transformers as small as ours are faster
    in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        convolutions = [layer for layer in model.modules() if type(layer) is nn.Conv2d]
        self._in_bfloat16 = bool(convolutions)
        for layer in convolutions:
            if layer.bias is not None:  # of VGG11: all are 3 x 3, padded by 1
                layer.__class__ = PatchConvolution

    def forward(self, inputs: Tensor) -> Tensor:
        """As the model in float32, but for the rounding."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._in_bfloat16):
            return torch.cat([self.model(some).float() for some in torch.split(inputs, COMPUTED_AT_ONCE)])


class OtherDecisionError(Exception):
    """A policy does not decide as the job before it was led."""


class SampledCluster(VirtualCluster):
    """A job that is over when it has trained `num_samples`, whatever its time; kept in a file from time to time."""

    num_samples: int
    file: Path
    _past: list[list[Report]]
    _decisions: list[Allocation]
    _again: list[list[Report]]
    """Reports to give again, newest first; the actions and traces that follow it are known."""
    _again_decided: list[Allocation]
    """Decisions to expect again, newest first."""
    _is_known = False
    _kept_s: float

    @property
    def over(self) -> bool:
        """Whether it has trained that many."""
        return self.position.samples_seen >= self.num_samples

    def run_window(self) -> list[Report]:
        """Train k steps, or give the reports of k steps before the job was kept."""
        self._is_known = bool(self._again)
        if self._again:
            return self._again.pop()
        if self.over or time.monotonic() - self._kept_s > KEPT_EVERY_S:
            new = self.file.with_suffix(".new")
            torch.save(self, new, pickle_module=cloudpickle)
            new.replace(self.file)
            self._kept_s = time.monotonic()
        self._past.append(super().run_window())
        return self._past[-1]

    def offer(self, action: Action) -> None:
        """Hand over an action; one that is known must be the same as before."""
        if not self._is_known:
            self._decisions.append(action.allocation)
            super().offer(action)
        elif self._again_decided.pop() != action.allocation:
            raise OtherDecisionError

    def leave_trace(self, trace: Trace) -> None:
        """Hand over a trace that is not known."""
        if not self._is_known:
            super().leave_trace(trace)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in DATA}

    @classmethod
    def begun(cls, file: Path, num_samples: int, *arguments: Any, **keywords: Any) -> Self:
        """The job as it was kept, or a new one; the other arguments are those of `VirtualCluster`."""
        made = cls(*arguments, **keywords)
        made.file, made.num_samples, made._past, made._decisions = file, num_samples, [], []
        made.gradients.model = ComputedInParts(made.gradients.model)
        if file.exists():
            kept: Self = torch.load(file, weights_only=False)
            if kept._past[0] != VirtualCluster.run_window(made):  # which also tells the job what its ranks timed
                raise OtherDecisionError
            vars(kept).update({name: getattr(made, name) for name in (*DATA, "job", "scenario")})
            kept._relink()
            made = kept
        made._again, made._again_decided = made._past[::-1], made._decisions[::-1]
        made._kept_s = time.monotonic()
        return made

    def _relink(self) -> None:
        """Restore what a file does not keep: gradients of parameters, and hooks of optimizers."""
        gradients, start = self.gradients, 0
        gradients.parameters.grad = gradients._gradient
        for parameter in gradients.model.parameters():
            parameter.grad = gradients._gradient[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        self._optimizer = self.rounds._common = self._like(self._optimizer, gradients.parameters)
        if self.rounds._ranks is not None:
            rows, optimizer = self.rounds._ranks
            rows.grad = torch.zeros_like(rows)
            self.rounds._ranks = rows, self._like(optimizer, rows)
            correct_second_moments(self.rounds._ranks[1], lambda: self.rounds._shares)

    def _like(self, old: torch.optim.Optimizer, parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
        new = self._make_optimizer(parameters)
        new.load_state_dict(old.state_dict())
        return new


def run_to(num_samples: int, cells: Iterable[ComparisonCell], ledger: Ledger, work: Path, data: Path | None) -> None:
    """Run what is not known yet, one after the other; the cells are of one scenario."""
    ended: dict[int, list[Path]] = defaultdict(list)
    for task, about in ((cell.task, cell.about) for cell in cells):
        file = work / f"{task.key[:12]}.job"
        if task not in ledger:
            for led in (*ended[task.seed], file):
                try:
                    outcome = _run(task, num_samples, data, led)
                except OtherDecisionError as error:
                    if led == file:
                        raise BenchmarkError(f"{file} is of a job that computed otherwise: remove it") from error
                    continue
                how = "trained" if led == file else "decides as one before"
                print(f"  {about}: {outcome.time_to_target_s} s, {outcome.test_accuracy:.4f}, {how}", flush=True)
                ledger.record_outcome(task, outcome, about)
                break
        if file.exists():
            ended[task.seed].append(file)
    for file in chain(*ended.values()):
        file.unlink()


def _run(task: RunTask, num_samples: int, data: Path | None, file: Path) -> RunOutcome:
    """The outcome of a task with the job in a file; raises OtherDecisionError when that was led otherwise."""
    episode = run_episode(
        task.effective_scenario,
        policy_of(task.setting),
        data=workload_data(task.scenario.workload, data),
        seed=task.seed,
        policy_options=task.setting.options,
        initial_local_batch_size=task.initial_local_batch_size,
        make_cluster=partial(SampledCluster.begun, file, num_samples),  # type: ignore[arg-type] # called like it
    )
    return msgspec.convert(episode, RunOutcome, from_attributes=True)
