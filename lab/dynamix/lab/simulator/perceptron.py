"""The gradients of a multi-layer perceptron, by hand: no graph is built, and the workers' own gradients come for free.

With D_l the derivative of the summed loss by layer l's outputs and A_l its inputs, worker i's summed gradient is
D_l[i]^T A_l[i] over its own rows; the sum over workers is the union's. So a measured step multiplies matrices of the
same total size as an unmeasured one. With autograd 8 workers x 64 samples take 2.5 times as long.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.lab.workloads import Workload

from .gradients import AutogradGradients, Gradients, StepSums

MAX_BLOCK = 1 << 20
"""Numbers in the workers' gradients that are held at once: more would leave the cache."""


class _Layer(NamedTuple):
    """Views into the flat vectors of parameters and of the gradient."""

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor
    bias_gradient: Tensor
    start: int
    """Where its weight lies in a flat vector; its bias follows."""


class _Pass(NamedTuple):
    """What a forward and backward pass leaves."""

    inputs: list[Tensor]
    """A of each layer: samples x inputs."""
    derivatives: list[Tensor]
    """D^T of each layer: outputs x samples, of the sum of the losses."""
    loss: Tensor
    correct: Tensor


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
        passed = self._pass(inputs, labels)
        self._write_sums(passed)
        self._gradient.div_(len(labels))
        return StepSums(self._segments.sums(passed.loss), self._segments.sums(passed.correct), None)

    @torch.inference_mode()
    def _own(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        passed = self._pass(inputs, labels)
        self._write_sums(passed)
        return float(passed.loss.sum(dtype=torch.float64)), float(passed.correct.sum())

    def _write_sums(self, passed: _Pass) -> None:
        """The gradient of the summed loss, where it belongs."""
        for layer, entered, derivative in zip(self._layers, passed.inputs, passed.derivatives, strict=True):
            torch.mm(derivative, entered, out=layer.weight_gradient)
            torch.sum(derivative, 1, out=layer.bias_gradient)

    @torch.inference_mode()
    def _measured(self, inputs: Tensor, labels: Tensor) -> StepSums:
        passed = self._pass(inputs, labels)
        biases = [self._segments.columns(derivative) for derivative in passed.derivatives]
        norms = np.zeros(len(self._segments.counts.values))
        slices = list(self._segments.slices())
        for first in range(0, len(slices), len(self._block)):
            own = slices[first : first + len(self._block)]
            block = self._block[: len(own)]
            for layer, entered, derivative, bias in zip(
                self._layers, passed.inputs, passed.derivatives, biases, strict=True
            ):
                self._fill(block, layer, entered, derivative, own)
                stop = layer.start + layer.weight.numel()
                block[:, stop : stop + layer.bias.numel()] = bias[first : first + len(own)]
            norms[[rank for rank, _, _ in own]] = torch.linalg.vector_norm(block, dim=1).numpy()
            if first == 0:
                torch.sum(block, 0, out=self._gradient)
            else:
                self._gradient.add_(block.sum(0))
        self._gradient.div_(len(labels))
        loss, correct = self._segments.sums(passed.loss), self._segments.sums(passed.correct)
        return StepSums(loss, correct, self._squared_norms(norms))

    def _fill(
        self, block: Tensor, layer: _Layer, entered: Tensor, derivative: Tensor, slices: list[tuple[int, int, int]]
    ) -> None:
        """Write the workers' summed gradients by one layer's weight into their rows."""
        rows = block[:, layer.start : layer.start + layer.weight.numel()].view(len(slices), *layer.weight.shape)
        for row, (_, start, stop) in zip(rows.unbind(), slices, strict=True):
            torch.mm(derivative[:, start:stop], entered[start:stop], out=row)

    def _pass(self, inputs: Tensor, labels: Tensor) -> _Pass:
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
        return _Pass(entered, derivatives[::-1], right[0].neg_(), correct)


def gradients_of(workload: Workload, *, seed: int, like: Tensor) -> Gradients:
    """A newly initialised model with the fastest way to its gradients. The global generator stays as it was.

    It lies where the inputs `like` do; its numbers are of their type, where that is one of floats.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # on the CPU, so that a seed gives the same weights wherever they end up
        model = workload.model().to(like.device, like.dtype if like.is_floating_point() else None)
    if isinstance(model, nn.Sequential) and is_perceptron(model) and like.device.type == "cpu":
        return PerceptronGradients(model, workload)
    return AutogradGradients(model, workload)


def is_perceptron(model: nn.Sequential) -> bool:
    """Whether a model is linear layers with biases, a ReLU between each two, behind at most a `Flatten`."""
    layers = list(model)
    if layers and isinstance(layers[0], nn.Flatten) and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    linear, between = layers[::2], layers[1::2]
    return (
        len(linear) == len(between) + 1
        and all(isinstance(layer, nn.Linear) and layer.bias is not None for layer in linear)
        and all(type(layer) is nn.ReLU for layer in between)
    )
