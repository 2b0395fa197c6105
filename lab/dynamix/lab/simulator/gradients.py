"""Real gradients of N workers in one process: one step of theirs is one step on the union of their samples.

With g_i the mean gradient of worker i's b_i samples, G = sum_i (b_i / B) g_i is the mean gradient of all B samples. A
measured step also gives |g_i|^2, as the hook of a real job does (`dynamix.trainer.gradient.hook`).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.lab.workloads import Part, Workload
from dynamix.trainer.data.plan import Counts, StepPlan

from .exchange import Array64

EVALUATED_AT_ONCE = 2000
"""Samples: the activations of a small model stay in the cache."""

_seeding = threading.Lock()
"""Torch initialises layers from one generator per process; clusters may be built by several threads."""


class WorkerNorms(NamedTuple):
    """Squared gradient norms of one step; float64."""

    local: Array64
    """|g_i|^2 of each worker's mean gradient; 0 without samples."""
    reduced: float
    """|G|^2"""


class StepSums(NamedTuple):
    """Sums of N workers over one step; float64, one per worker."""

    loss: Array64
    """Sum over the worker's samples."""
    num_correct: Array64
    norms: WorkerNorms | None
    """`None` on a step that was not measured."""


class WorkerSegments:
    """Positions of each worker's samples in the union of a step, for sums per worker."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.sizes = np.array(counts.values, dtype=np.float64)
        self._active = np.flatnonzero(self.sizes)
        self._starts = np.array(counts.starts[:-1])[self._active]

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop) of the workers that have samples."""
        starts = self.counts.starts
        for rank in self._active.tolist():
            yield rank, starts[rank], starts[rank + 1]

    def sums(self, values: Tensor) -> Array64:
        """The values of all samples, summed per worker in float64."""
        found = np.zeros(len(self.sizes))
        found[self._active] = np.add.reduceat(values.numpy(), self._starts, dtype=np.float64)
        return found

    def columns(self, values: Tensor) -> Tensor:
        """Columns of a matrix (one per sample) summed per worker that has samples: workers x rows."""
        return torch.from_numpy(np.add.reduceat(values.numpy(), self._starts, axis=1).T)


class Gradients(ABC):
    """A model whose parameters lie in one flat vector, and its gradients by worker."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        self.model = model
        self._workload = workload
        self.parameters = flatten(model)
        assert self.parameters.grad is not None
        self._gradient = self.parameters.grad
        self._segments = WorkerSegments(Counts((1,)))

    def step(self, inputs: Tensor, labels: Tensor, plan: StepPlan, *, measured: bool) -> StepSums:
        """Leave the gradient G of a step's B samples, in rank order, in `parameters.grad`.

        The plan says how many samples each worker has, `measured` whether the workers' own gradients are looked at.
        """
        if self._segments.counts is not plan.counts:
            self._segments = WorkerSegments(plan.counts)
        return self._measured(inputs, labels) if measured else self._union(inputs, labels)

    def step_of_each(
        self, inputs: Tensor, labels: Tensor, plan: StepPlan, gradients: Tensor, *, at: Tensor | None = None
    ) -> StepSums:
        """Write each worker's gradient of the SUM of its losses into its row of `gradients`; `norms` stays empty.

        `at` has each worker's own parameters, which replace those of the model. Costs a forward and backward pass per
        worker, on its own samples only.
        """
        counts = plan.counts
        if self._segments.counts is not counts:
            self._segments = WorkerSegments(counts)
        loss, correct = np.zeros(len(counts.values)), np.zeros(len(counts.values))
        gradients.zero_()
        for rank, start, stop in self._segments.slices():
            if at is not None:
                self.parameters.data.copy_(at[rank])
            loss[rank], correct[rank] = self._own(inputs[start:stop], labels[start:stop])
            gradients[rank] = self._gradient
        return StepSums(loss, correct, None)

    def accuracy(self, part: Part) -> float:
        """Share of a part's samples that the model gets right now."""
        correct, count = 0.0, len(part.labels)
        with torch.inference_mode():
            for start in range(0, count, EVALUATED_AT_ONCE):
                inputs, labels = (tensor[start : start + EVALUATED_AT_ONCE] for tensor in part)
                correct += self._workload.num_correct(self.model(inputs), labels)
        return correct / count

    def squared_norms(self, norms_of_sums: Array64) -> WorkerNorms:
        """The norms of a step from |b_i g_i| of each worker, and from the gradient G as it is now."""
        sizes = self._segments.sizes
        means = np.divide(norms_of_sums, sizes, out=np.zeros(len(sizes)), where=sizes > 0)
        return WorkerNorms(means * means, torch.dot(self._gradient, self._gradient).item())

    @abstractmethod
    def _union(self, inputs: Tensor, labels: Tensor) -> StepSums:
        """The step as one big batch."""

    @abstractmethod
    def _own(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Leave the gradient of the sum of some samples' losses; returns that sum, and how many are right."""

    @abstractmethod
    def _measured(self, inputs: Tensor, labels: Tensor) -> StepSums:
        """The step worker by worker."""


class AutogradGradients(Gradients):
    """Gradients of any model: a measured step costs a backward pass per worker, on its own samples only."""

    def _union(self, inputs: Tensor, labels: Tensor) -> StepSums:
        self._gradient.zero_()
        outputs = self.model(inputs)
        torch.autograd.backward(self._workload.loss(outputs, labels))
        num_workers = len(self._segments.counts.values)
        loss, correct = np.zeros(num_workers), np.zeros(num_workers)
        with torch.inference_mode():
            for rank, start, stop in self._segments.slices():
                loss[rank], correct[rank] = self._sums(outputs[start:stop], labels[start:stop])
        return StepSums(loss, correct, None)

    def _measured(self, inputs: Tensor, labels: Tensor) -> StepSums:
        num_workers = len(self._segments.counts.values)
        loss, correct, norms = np.zeros(num_workers), np.zeros(num_workers), np.zeros(num_workers)
        total = torch.zeros_like(self._gradient)
        for rank, start, stop in self._segments.slices():
            loss[rank], correct[rank] = self._own(inputs[start:stop], labels[start:stop])
            total += self._gradient
            norms[rank] = torch.linalg.vector_norm(self._gradient).item()
        self._gradient.copy_(total.div_(self._segments.counts.total))
        return StepSums(loss, correct, self.squared_norms(norms))

    def _own(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        self._gradient.zero_()
        outputs = self.model(inputs)
        torch.autograd.backward(self._workload.loss(outputs, labels, "sum"))
        return self._sums(outputs.detach(), labels)

    def _sums(self, outputs: Tensor, labels: Tensor) -> tuple[float, float]:
        return self._workload.loss(outputs, labels, "sum").item(), self._workload.num_correct(outputs, labels)


def flatten(model: nn.Module) -> nn.Parameter:
    """Move a model's parameters, and their gradients, into one vector each: the optimizer then has one tensor."""
    owned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in owned]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for parameter in owned:
        stop = start + parameter.numel()
        parameter.data = flat.data[start:stop].view(parameter.shape)
        parameter.grad = flat.grad[start:stop].view(parameter.shape)
        start = stop
    return flat


PERCEPTRON = {nn.Flatten, nn.Linear, nn.ReLU}
MAX_BLOCK = 1 << 20
"""Numbers in the workers' gradients that are held at once: more would leave the cache."""


class _Layer(NamedTuple):
    """Views into the flat vectors of parameters and of the gradient."""

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    start: int
    """Position of its weight in a flat vector; its bias follows."""


class PerceptronGradients(Gradients):
    """Gradients of `Sequential(Flatten, Linear, ReLU, ..., Linear)` under cross entropy, the loss of all workloads."""

    def __init__(self, model: nn.Sequential, workload: Workload) -> None:
        super().__init__(model, workload)
        self._layers: list[_Layer] = []
        start = 0
        for linear in (module for module in model if isinstance(module, nn.Linear)):
            weight_gradient, bias_gradient = linear.weight.grad, linear.bias.grad
            assert weight_gradient is not None
            assert bias_gradient is not None
            weight, bias = linear.weight.detach(), linear.bias.detach()
            self._layers.append(_Layer(weight, bias, weight_gradient, bias_gradient, start))
            start += weight.numel() + bias.numel()
        self._block = self._gradient.new_empty(max(1, MAX_BLOCK // start), start)

    @torch.inference_mode()
    def _union(self, inputs: Tensor, labels: Tensor) -> StepSums:
        loss, correct = self._write_sums(inputs, labels)
        self._gradient.div_(len(labels))
        return StepSums(self._segments.sums(loss), self._segments.sums(correct), None)

    @torch.inference_mode()
    def _own(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        loss, correct = self._write_sums(inputs, labels)
        return float(loss.sum(dtype=torch.float64)), float(correct.sum())

    def _write_sums(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Write the gradient of the summed loss into each layer; the losses, and which samples are right."""
        entered, derivatives, loss, correct = self._pass(inputs, labels)
        for layer, own_inputs, derivative in zip(self._layers, entered, derivatives, strict=True):
            torch.mm(derivative, own_inputs, out=layer.weight_gradient)
            torch.sum(derivative, 1, out=layer.bias_gradient)
        return loss, correct

    @torch.inference_mode()
    def _measured(self, inputs: Tensor, labels: Tensor) -> StepSums:
        inputs_by_layer, derivatives, losses, right = self._pass(inputs, labels)
        biases = [self._segments.columns(derivative) for derivative in derivatives]
        norms = np.zeros(len(self._segments.counts.values))
        slices = list(self._segments.slices())
        for first in range(0, len(slices), len(self._block)):
            own = slices[first : first + len(self._block)]
            block = self._block[: len(own)]
            for layer, entered, derivative, bias in zip(
                self._layers, inputs_by_layer, derivatives, biases, strict=True
            ):
                rows = block[:, layer.start : layer.start + layer.weight.numel()].view(len(own), *layer.weight.shape)
                for row, (_, start, end) in zip(rows.unbind(), own, strict=True):
                    torch.mm(derivative[:, start:end], entered[start:end], out=row)
                stop = layer.start + layer.weight.numel()
                block[:, stop : stop + layer.bias.numel()] = bias[first : first + len(own)]
            norms[[rank for rank, _, _ in own]] = torch.linalg.vector_norm(block, dim=1).numpy()
            if first == 0:
                torch.sum(block, 0, out=self._gradient)
            else:
                self._gradient.add_(block.sum(0))
        self._gradient.div_(len(labels))
        loss, correct = self._segments.sums(losses), self._segments.sums(right)
        return StepSums(loss, correct, self.squared_norms(norms))

    def _pass(self, inputs: Tensor, labels: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Forward and backward: each layer's inputs A (samples x inputs) and D^T (outputs x samples), losses, hits."""
        *hidden, last = self._layers
        entered = [inputs.flatten(1)]
        for layer in hidden:
            entered.append(torch.addmm(layer.bias, entered[-1], layer.weight.t()).relu_())
        # classes x samples: along the samples, softmax runs 15 times as fast as along ten classes
        logits = torch.addmm(last.bias[:, None], last.weight, entered[-1].t())
        log_shares = torch.log_softmax(logits, 0)
        right = log_shares.gather(0, labels[None])
        correct = right[0] >= log_shares.amax(0)
        derivative = log_shares.exp_().scatter_add_(0, labels[None], torch.full_like(right, -1.0))
        derivatives = [derivative]
        for layer, output in zip(self._layers[:0:-1], entered[:0:-1], strict=True):
            backward = torch.mm(derivatives[-1].t(), layer.weight)
            derivatives.append(torch.ops.aten.threshold_backward(backward, output, 0).t())
        return entered, derivatives[::-1], right[0].neg_(), correct


def gradients_of(workload: Workload, *, seed: int, like: Tensor) -> Gradients:
    """A newly initialised model with the fastest way to its gradients. The global generator stays as it was.

    It lies where the inputs `like` do; its numbers are of their type, where that is one of floats.
    """
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # on the CPU, so that a seed gives the same weights wherever they end up
        model = workload.model().to(like.device, like.dtype if like.is_floating_point() else None)
    if (
        like.device.type == "cpu"
        and isinstance(model, nn.Sequential)
        and {type(layer) for layer in model} <= PERCEPTRON
    ):
        return PerceptronGradients(model, workload)
    return AutogradGradients(model, workload)
