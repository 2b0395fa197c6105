"""Covered models: the models of one session, each with its communication hook where it has one.

A step may exchange gradients of several models (a generator and a discriminator), and of one several times. All weigh
by the same plan; compute times come with every exchange, and those of the step's last one count.

Torch adds up the gradients g_j of micro-batches in `Parameter.grad`. With a mean loss they must count by their samples
or tokens, sum_j m_j g_j, so what was added up is scaled by m_j / m_(j+1) where the next one has another weight: with
samples at most once per step, since sizes differ by one. The whole is then in the scale of the last micro-batch.
"""

import gc
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from dynamix.trainer.data.plan import MicroBatch, StepPlan
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.exchange.plan import ExchangePlan, ModelExchange
from dynamix.trainer.gradient.hook import (
    NOT_MEASURED,
    GradientHook,
    Reduction,
    SquaredNorms,
    StepSketches,
    StepWeights,
    loss_weight,
)

from .losses import LossWarnings
from .models import set_gradient_sync
from .noise import NormSketch

DROPPED = (
    "the gradients of this step's earlier micro-batches are gone: call optimizer.zero_grad() only where "
    "session.sync_gradients is true, after optimizer.step()"
)


class _HookPlace:
    """The one communication hook that DDP allows a model, for one session after the other."""

    def __init__(self, hook: GradientHook | None) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[type["_HookPlace"], tuple[None]]:
        return _HookPlace, (None,)  # a copied model belongs to no session: DDP does not take its hook along

    def reduce(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook that DDP calls for each bucket."""
        assert self.hook is not None, "DDP registers no hook of a model that it copied"
        return self.hook.reduce(bucket)


_places: "weakref.WeakKeyDictionary[torch.nn.Module, _HookPlace]" = weakref.WeakKeyDictionary()
"""The hook of each model that was ever covered."""


class _SessionHook:
    """A hook on a user's model: keeps no session alive, and a copied or pickled one does nothing."""

    def __init__(self, owner: object | None, function: Callable[..., None]) -> None:
        """`function` is called with the owner first, as long as that lives."""
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Call the function, if the owner lives."""
        if (alive := self._owner()) is not None:
            self._function(alive, *arguments)

    def __reduce__(self) -> tuple[type["_SessionHook"], tuple[None, Callable[..., None]]]:
        return _SessionHook, (None, self._function)


class CoveredModels:
    """Weighs the gradients of the models of one session."""

    def __init__(
        self,
        make_hook: Callable[[DistributedDataParallel, StepWeights], GradientHook] | None,
        reduction: Reduction,
        weights: StepWeights,
        exchange: ExchangePlan,
        *,
        weighs_alone: bool = False,
        losses: LossWarnings | None = None,
    ) -> None:
        """`make_hook` is `None` where losses are scaled, or there is nothing to exchange; else `exchange` says how.

        With `weighs_alone`, in a world of one process, gradients are weighed as they come.
        """
        self._weighs_alone = weighs_alone
        self._losses = losses
        self._weights = weights
        self._reduction: Reduction = reduction
        self._exchange = exchange
        self.models: list[torch.nn.Module] = []
        self._hooks: list[GradientHook] = []
        self._make_hook = make_hook
        self._num_reduced = 0
        self._saw_no_sync = False
        self._only_adds = False
        """Whether the current micro-batch's gradient is only added up."""
        self._probe: tuple[torch.nn.Parameter, torch.Tensor] | None = None
        """A parameter, and the gradient that it had before the last micro-batch."""
        self._batch: MicroBatch | None = None
        self._handles: list[RemovableHandle] = []
        self._ignored: list[torch.nn.Module] = []
        self._unshared: list[DistributedDataParallel] = []
        self._sketches: list[NormSketch] = []
        """Norms of the newest step, if it was local and measured, by model; their cells are not summed yet."""

    def cover(self, model: torch.nn.Module) -> None:
        """Weigh one more model.

        Raises:
            ValueError: when hooks weigh and the model is not under DDP, or updated in its backward pass.
            RuntimeError: when it has a communication hook already, or was covered already.
        """
        if any(model is each for each in self.models):
            raise RuntimeError("the model is covered already: name each model once")
        if self._make_hook is not None:
            if not isinstance(model, DistributedDataParallel):
                raise ValueError(
                    f"{type(model).__name__} is not under DistributedDataParallel, but another model of the session "
                    "is: wrap it too"
                )
            if any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()):
                raise ValueError(
                    "the parameters are updated inside of the backward pass (_apply_optimizer_in_backward), for which "
                    "DistributedDataParallel takes its one communication hook: call optimizer.step() after it instead"
                )
            self._hooks.append(self._register(model, self._make_hook(model, self._weights)))
            self._handles.append(model.register_forward_pre_hook(_SessionHook(self, CoveredModels.note_forward)))
        elif self._weighs_alone:
            self._handles += [each.register_hook(self.weigh_alone) for each in model.parameters()]  # type: ignore[no-untyped-call]
        self.models.append(model)

    def _register(self, model: DistributedDataParallel, hook: GradientHook) -> GradientHook:
        place = _places.get(model)
        if place is not None:
            if place.hook is not None and not place.hook.is_retired:
                raise RuntimeError("another session covers the model: end that one first, session.close()")
            place.hook = hook
            return hook
        place = _HookPlace(hook)
        try:
            model.register_comm_hook(None, place.reduce)
        except RuntimeError as error:
            raise RuntimeError(
                "the model has a communication hook already: do not register it, pass it to attach as base_hook"
            ) from error
        _places[model] = place
        return hook

    def refuse_others(self) -> None:
        """Refuse to train DDP models that are not covered, where hooks weigh: their gradients would be wrong."""
        if self._make_hook is None:
            return
        self._handles.append(
            register_module_module_registration_hook(_SessionHook(self, CoveredModels.watch_registered))
        )
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel):
                self._watch(found)

    def ignore(self, model: torch.nn.Module) -> None:
        """Do not refuse a model that is not covered."""
        self._ignored.append(model)

    def watch_registered(self, parent: torch.nn.Module, name: str, _child: Any) -> None:
        """Watch a DDP model that is just being made."""
        if name == "module" and isinstance(parent, DistributedDataParallel):
            self._watch(parent)

    def _watch(self, model: torch.nn.Module) -> None:
        if not self._covers(model):
            self._handles.append(model.register_forward_pre_hook(_SessionHook(self, CoveredModels.refuse)))

    def refuse(self, model: torch.nn.Module, _inputs: Any = None) -> None:
        """Raise RuntimeError when the model is trained and still not covered."""
        if model.training and torch.is_grad_enabled() and not self._covers(model):
            raise RuntimeError(
                "a second DistributedDataParallel model is trained, which the session does not weigh: pass all models "
                "and optimizers to attach as lists, or call session.cover(model, optimizer); one that has batches of "
                "its own, equally long on all ranks, is left alone after session.ignore(model)"
            )

    def _covers(self, model: torch.nn.Module) -> bool:
        return any(model is each for each in (*self.models, *self._ignored))

    def keep_buffers(self, model: DistributedDataParallel) -> None:
        """Stop DDP's broadcasts of a model's buffers until `broadcast_buffers`."""
        model.broadcast_buffers = False
        self._unshared.append(model)

    def broadcast_buffers(self) -> None:
        """Restore DDP's broadcasts of buffers."""
        for model in self._unshared:
            model.broadcast_buffers = True
        self._unshared.clear()

    def remove(self) -> None:
        """Train the models without the session, as plain DDP does: communication hooks cannot be removed."""
        for hook in self._hooks:
            hook.retire()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.broadcast_buffers()
        self._exchange.close()

    @property
    def exchanges(self) -> list[ModelExchange]:
        """The exchanges that carry out decisions, by model."""
        return [hook.model_exchange for hook in self._hooks]

    def coded(self) -> CodedSquares:
        """Squared norms of what lossy codecs have sent and should have sent, of all models."""
        return reduce(CodedSquares.and_more, (each.coded() for each in self.exchanges), CodedSquares())

    def begin(self, batch: MicroBatch, *, shares_times: bool, sketches: bool = False) -> None:
        """Prepare all models for a batch: what was added up before it, and whether gradients are exchanged after it.

        Raises:
            RuntimeError: when the gradients of the micro-batches before it are gone.
        """
        self._batch = batch
        self._probe = None
        if self._only_adds == batch.is_last:  # else left alone: a script may have its own reasons for `no_sync`
            self._only_adds = not batch.is_last
            for model in self.models:
                set_gradient_sync(model, exchanged=batch.is_last)
        before = self._weights.begin(batch)
        if before is not None:
            self._rescale(before, self._weights.newest)
        if batch.is_last:
            exchange = self._exchange.of_step(batch.plan.step)
            if self._losses is not None:
                self._losses.begin_step()
            for hook in self._hooks:
                hook.begin(batch, shares_times=shares_times, exchange=exchange, sketches=sketches)

    def _rescale(self, before: int, count: int) -> None:
        """Bring what was added up with the weight `before` into the scale of the weight `count`."""
        parameters = [each for model in self.models for each in model.parameters() if each.grad is not None]
        if not parameters:
            raise RuntimeError(DROPPED)
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not any(getattr(model, "gradient_as_bucket_view", False) for model in self.models):
            self._probe = parameters[0], gradients[0]
        if self._make_hook is None:
            return  # `scale_loss` weighs
        if before == 0:  # not times zero: a dummy batch may have made it NaN
            torch._foreach_zero_(gradients)
        elif self._reduction == "mean" and before != count:
            torch._foreach_mul_(gradients, before / count)

    def check_gradients(self) -> None:
        """Make sure, before the update, that no gradient of an earlier micro-batch was dropped.

        Raises:
            RuntimeError: when one was.
        """
        probe, self._probe = self._probe, None
        if probe is not None and probe[0].grad is not probe[1]:
            raise RuntimeError(DROPPED)

    def take_sketches(self, plan: StepPlan) -> StepSketches | None:
        """The sketches of the step that ended, with this plan; `None` where nothing was sketched."""
        sketches, self._sketches = self._sketches, []
        return StepSketches(sketches, plan.counts, self._weights.over_mean()) if sketches else None

    def loss_factor(self, batch: MicroBatch) -> float:
        """Factor on the loss of a batch before a framework that averages gradients over all ranks."""
        if not self._weights.total():
            return 0.0
        factor = self._weights.factor() * self._weights.correction()
        return loss_weight(batch, self._reduction) * self._exchange.world_size * factor

    def weigh_alone(self, gradient: torch.Tensor) -> torch.Tensor:
        """Weigh the gradient of a batch before it is added to those before it."""
        factor = 1.0 if self._batch is None else self.loss_factor(self._batch)
        return gradient if factor == 1.0 else gradient * factor

    def note_forward(self, model: torch.nn.Module, _inputs: Any) -> None:
        """Note a forward pass under the script's own `no_sync`, and the collectives before it."""
        batch = self._batch
        # a compiled model's hooks are compiled too: what they read would be compiled for each of its values
        if self._losses is not None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._losses.forward_begins(model)
        if batch is not None and batch.is_last and not model.require_backward_grad_sync and torch.is_grad_enabled():
            self._saw_no_sync = True

    def end_step(self, *, updated: bool) -> SquaredNorms:
        """End a step; returns its squared norms over all models.

        Raises:
            RuntimeError: when the script accumulates on its own: neither exchanged nor `updated` in this step.
        """
        before, self._num_reduced = self._num_reduced, sum(hook.num_reduced for hook in self._hooks)
        saw_no_sync, self._saw_no_sync = self._saw_no_sync, False
        if saw_no_sync and not updated and self._num_reduced == before:
            raise RuntimeError(
                "session.step() after a batch under no_sync (require_backward_grad_sync=False), whose gradient was "
                "neither exchanged nor applied: for gradient accumulation drop no_sync, call optimizer.step() only if "
                "session.sync_gradients, and pass to attach either micro_batch_size, where the script divides no loss, "
                "or gradient_accumulation_steps=N, where it divides each by N; local_batch_size counts the whole step"
            )
        if not self._hooks:
            return NOT_MEASURED
        norms = [hook.take_norms() for hook in self._hooks]
        self._sketches = [hook.sketch for hook in self._hooks if hook.sketch is not None]
        for hook in self._hooks:
            hook.average_plainly()
        return SquaredNorms([v for each in norms for v in each.local], [v for each in norms for v in each.reduced])

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank, as the step's last exchange brought them."""
        newest = None
        for hook in sorted(self._hooks, key=lambda hook: hook.reduced_at):
            newest = hook.take_times() or newest
        return newest
