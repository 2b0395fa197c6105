"""Jobs that train to a number of samples, for hours: kept every few minutes, so that a killed one goes on where it was.

Used by `bench.virtual` for the paper's models at their own size; those with convolutions compute in bfloat16. What is
kept of a job is its cluster, with weights and clock, and the reports so far: the arbitrator is told these again and
decides the same.
"""
# ruff: noqa: SLF001 - a job is kept whole, private state and all

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Self

import cloudpickle  # type: ignore[import-untyped]
import msgspec
import torch
from torch import Tensor, nn

from dynamix.lab.comparison.runs import ComparisonCell, Ledger, policy_of
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import RunOutcome, run_episode, workload_data
from dynamix.schemas.messages import Action, Report, Trace
from dynamix.trainer.gradient.learning_rate import correct_second_moments

KEPT_EVERY_S = 600.0
DATA = ("_data", "_evaluated", "_test")


class HalfPrecision(nn.Module):
    """A model that computes in bfloat16; parameters, loss and optimizer stay in float32 (torch's mixed precision)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """As the model in float32, but for the rounding."""
        with torch.autocast("cpu", torch.bfloat16):
            outputs: Tensor = self.model(inputs)
        return outputs.float()


class SampledCluster(VirtualCluster):
    """A job that is over when it has trained `num_samples`, whatever its time; kept in a file until then."""

    num_samples: int
    file: Path
    _past: list[list[Report]]
    _again: list[list[Report]]
    """What is to be reported again, newest first; the actions and traces that follow it are known."""
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
        if time.monotonic() - self._kept_s > KEPT_EVERY_S:
            new = self.file.with_suffix(".new")
            torch.save(self, new, pickle_module=cloudpickle)
            new.replace(self.file)
            self._kept_s = time.monotonic()
        self._past.append(super().run_window())
        return self._past[-1]

    def offer(self, action: Action) -> None:
        """Hand over an action that is not known."""
        if not self._is_known:
            super().offer(action)

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
        made.file, made.num_samples, made._past = file, num_samples, []
        if any(isinstance(layer, nn.Conv2d) for layer in made.gradients.model.modules()):
            made.gradients.model = HalfPrecision(made.gradients.model)  # twice as fast with AVX512-BF16
        if file.exists():
            kept: Self = torch.load(file, weights_only=False)
            vars(kept).update({name: getattr(made, name) for name in DATA})
            kept._relink()
            made = kept
        made._again, made._kept_s = made._past[::-1], time.monotonic()
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
    """Run what is not known yet, one after the other."""
    for task, about in ((cell.task, cell.about) for cell in cells if cell.task not in ledger):
        file = work / f"{task.key[:12]}.job"
        episode = run_episode(
            task.effective_scenario,
            policy_of(task.setting),
            data=workload_data(task.scenario.workload, data),
            seed=task.seed,
            policy_options=task.setting.options,
            initial_local_batch_size=task.initial_local_batch_size,
            make_cluster=partial(SampledCluster.begun, file, num_samples),  # type: ignore[arg-type] # called like it
        )
        ledger.record_outcome(task, msgspec.convert(episode, RunOutcome, from_attributes=True), about)
        file.unlink(missing_ok=True)
        print(f"  {about}: {episode.time_to_target_s} s, {episode.test_accuracy:.4f}", flush=True)
