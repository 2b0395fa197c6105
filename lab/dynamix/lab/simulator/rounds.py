"""Local steps of virtual ranks: each has its own parameters and optimizer state, as a row of one matrix.

The semantics are those of `dynamix.trainer.local_steps`. The optimizers of the catalog work elementwise, so that one of
them on the matrix is one for each rank. With N ranks that takes the memory of the
model and its optimizer's state N times, and the CPU a forward and backward pass per rank.
"""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn

from dynamix.schemas.messages.allocation import EXACT
from dynamix.trainer.data.plan import StepPlan
from dynamix.trainer.exchange.plan import StepExchange
from dynamix.trainer.gradient.learning_rate import correct_second_moments
from dynamix.trainer.gradient.noise import NormSketch, RoundMeasurement
from dynamix.trainer.local_steps import agreement_after, mean_counts, outer_step

from .clock import StepTiming
from .exchange import Array64, StepTraffic, VirtualExchange, with_numbers
from .gradients import Gradients, StepSums, WorkerNorms

MakeOptimizer = Callable[[nn.Parameter], torch.optim.Optimizer]


class VirtualRounds:
    """Rounds of local steps; nothing is begun where no exchange asks for them."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        exchange: VirtualExchange,
        make: MakeOptimizer,
        *,
        noise_every: int,
    ) -> None:
        """`optimizer` is that of the ranks in common, `make` one for rows, of the same kind and rate."""
        self._measurement = RoundMeasurement(noise_every)
        self._sketch_bytes = 0
        """Size of the sketch that is sent at the end of this round."""
        self._gradients = gradients
        self._common = optimizer
        self._exchange = exchange
        self._make = make
        self._ranks: tuple[nn.Parameter, torch.optim.Optimizer] | None = None
        """Their parameters, a row each, and the optimizer of these."""
        self._start = gradients.parameters.detach().clone()
        """The parameters with which the round began."""
        self._shares = self._start.new_ones(exchange.world_size, 1)
        """Shares of the newest step's samples, of each rank's node."""
        self._velocity: Tensor | None = None
        """Momentum of outer steps, where they have any."""
        self._agreement = 0.0
        """How far the newest rounds agree."""
        self._num_samples: Array64 = np.zeros(exchange.world_size)
        self.num_steps = 0
        """Steps of the round so far."""
        self.computed_s: Array64 = np.zeros(exchange.world_size)
        """Compute time of each rank in the round so far, in seconds."""
        self._ended: tuple[Array64, int] = self._num_samples, 1
        """Samples by rank and steps of the newest round that ended."""
        self.ended_times: tuple[list[float], tuple[int, ...]] = [], ()
        """Its seconds per sample by rank, 0 without samples, and its samples per step, as real ranks exchange them."""

    def compute(self, inputs: Tensor, labels: Tensor, plan: StepPlan) -> StepSums:
        """Compute the mean gradient of each rank's samples at its own parameters, and show the mean of these."""
        parameters, _ = self._begun()
        means = parameters.grad
        assert means is not None, "made with the ranks"
        sums = self._gradients.step_of_each(inputs, labels, plan, means, at=parameters.detach())
        means.div_(means.new_tensor(plan.counts.values).clamp_(min=1)[:, None])
        measures = self._measurement.measures(plan.step, begins_round=self.num_steps == 0)
        local = torch.linalg.vector_norm(means, dim=1).double().numpy() ** 2 if measures else np.zeros(0)
        self._exchange.average_nodes(means, plan.counts.values)
        self._show_mean()
        if not measures:
            return sums
        # norms as real ranks measure them, of a gradient that none of them has: sketches add up
        sketch = NormSketch(plan.step, 1.0)
        sketch.add(torch.mv(means.t(), means.new_tensor(plan.counts.values) / plan.counts.total), 0)
        self._sketch_bytes = sketch.cells.nbytes
        return sums._replace(norms=WorkerNorms(local, sketch.reduced()))

    def update(self, plan: StepPlan, step: StepExchange, *, ends_epoch: bool) -> StepTraffic | None:
        """Update each rank; returns what was sent after a round's last step. Evaluated parameters stay."""
        parameters, optimizer = self._begun()
        together = self._exchange.world_size // self._exchange.num_members
        of_nodes = self._start.new_tensor(plan.counts.values).view(-1, together).sum(1).repeat_interleave(together)
        self._shares = of_nodes[:, None] / plan.counts.total
        optimizer.step()
        self.num_steps += 1
        self._num_samples = self._num_samples + np.asarray(plan.counts.values)
        exchange, following = step.exchange, step.following
        if self.num_steps < exchange.every and exchange == following and not ends_epoch:
            return None
        weights = self._weights()
        moved = (parameters.detach() - self._start) * weights[:, None]
        total = torch.empty_like(self._start)
        traffic = self._exchange.sum(moved, step, total, of_moves=True)
        if self._sketch_bytes:
            traffic = with_numbers(traffic, self._sketch_bytes, self._exchange.num_members)
            self._sketch_bytes = 0
        if self.num_steps < exchange.every:
            self._start.add_(total)
        else:
            if exchange.outer_momentum and self._velocity is None:
                self._velocity = torch.zeros_like(total)
            before = torch.zeros_like(total) if self._velocity is None else self._velocity
            dot, squares, before_squares = (
                float(torch.dot(*each)) for each in ((total, before), (total, total), (before, before))
            )
            self._start.add_(outer_step(exchange, total, self._velocity, self._agreement))
            self._agreement = agreement_after(self._agreement, dot, squares, before_squares)
        parameters.data.copy_(self._start.expand_as(parameters))
        self._ended, self.num_steps = (self._num_samples, self.num_steps), 0
        self._num_samples = np.zeros_like(self._num_samples)
        if following != exchange:
            self._velocity, self._agreement = None, 0.0
        if following.every == 1 or ends_epoch:
            traffic += self._average_optimizers(parameters, optimizer, weights)
        return traffic

    def end_step(self, timing: StepTiming, step: StepExchange) -> None:
        """Take in what each rank's step took, and show what is in force: before a step that is not local, for all."""
        self.computed_s = self.computed_s + timing.compute_s
        if self.num_steps == 0:
            samples, num_steps = self._ended
            seconds = np.divide(self.computed_s, samples, out=np.zeros_like(self.computed_s), where=samples > 0)
            self.ended_times = seconds.tolist(), mean_counts((int(number) for number in samples), num_steps)
            self.computed_s = np.zeros_like(self.computed_s)
        self._show_mean()
        if step.following.every == 1:
            assert self.num_steps == 0, "a round ends before another exchange is active"
            self._ranks = None

    def _show_mean(self) -> None:
        """Put the mean of the ranks' parameters, weighted by their samples in the round, where it is evaluated."""
        shown, (parameters, _) = self._gradients.parameters.data, self._begun()
        if self.num_steps == 0:
            shown.copy_(self._start)
        else:
            torch.mv(parameters.detach().t(), self._weights(), out=shown)

    def _weights(self) -> Tensor:
        return self._start.new_tensor(self._num_samples / self._num_samples.sum())

    def _begun(self) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        """The ranks; all begin with what they had in common."""
        if self._ranks is None:
            common = self._gradients.parameters
            self._start.copy_(common.detach())
            rows = nn.Parameter(common.detach().expand(self._exchange.world_size, -1).clone())
            rows.grad = torch.zeros_like(rows)
            optimizer = self._make(rows)
            correct_second_moments(optimizer, lambda: self._shares)
            for name, value in self._common.state.get(common, {}).items():
                is_like = isinstance(value, Tensor) and value.shape == common.shape
                optimizer.state[rows][name] = value.expand_as(rows).clone() if is_like else deepcopy(value)
            self._ranks = rows, optimizer
        return self._ranks

    def _average_optimizers(
        self, parameters: nn.Parameter, optimizer: torch.optim.Optimizer, weights: Tensor
    ) -> StepTraffic:
        """Replace all optimizers' states by their weighted mean, that of the common one as well."""
        common, traffic, exact = self._gradients.parameters, StepTraffic(), StepExchange(EXACT, EXACT)
        for name, value in optimizer.state[parameters].items():
            if isinstance(value, Tensor) and value.shape == parameters.shape:
                mean = torch.empty_like(self._start)
                traffic += self._exchange.sum(value * weights[:, None], exact, mean, of_moves=True)
                value.copy_(mean.expand_as(value))
                self._common.state[common][name] = mean
            else:
                self._common.state[common][name] = deepcopy(value)
        return traffic
