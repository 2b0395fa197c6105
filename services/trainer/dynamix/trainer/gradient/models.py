"""The user's models: unwrapped, told apart by who averages their gradients, and found where no session covers them.

A model under `DistributedDataParallel` is weighed by its communication hook. Sharded models (FSDP) average gradients
themselves: the loss is scaled. Any other model in a world of several ranks is refused, unless the script says that a
framework averages its gradients: unweighted or unaveraged gradients train wrong without a word.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

Weighting = Literal["auto", "hook", "loss"]
"""How gradients are weighted, as the script sets it; `auto` depends on the models' types."""

Averaging = Literal["hook", "loss", "none"]
"""How gradients are weighted: by communication hooks, by the script's loss (`scale_loss`), or not at all with one
rank."""

WRAPPERS = ("_orig_mod", "_orig_module", "_forward_module")
"""Attributes by which compiled models, and those of Lightning Fabric, name what they wrap."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of `torch.compile` and the like, down to DDP or to the user's own module."""
    inner: torch.nn.Module | None = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        model = inner
        found = (getattr(model, name, None) for name in WRAPPERS)
        inner = next((each for each in found if isinstance(each, torch.nn.Module)), None)
    return model if inner is None else inner


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate and Lightning.

    Raises:
        TypeError: when there is none.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer, and wraps none: pass model, optimizer and "
            "data set in this order"
        )
    return optimizer


def averaging_of(models: Sequence[torch.nn.Module], weighting: Weighting, world_size: int) -> Averaging:
    """The averaging that weights the gradients of these models.

    Raises:
        ValueError: when nothing would average them over the ranks, hooks are asked for without DDP, or an engine would
            weigh them on its own.
    """
    for model in models:
        _refuse_engine(model)
    are_ddp = [isinstance(model, DistributedDataParallel) for model in models]
    if weighting == "hook" and not all(are_ddp):
        raise ValueError('weighting="hook" needs a DistributedDataParallel model: use weighting="loss"')
    if weighting != "loss" and all(are_ddp):
        _refuse_sparse_gradients(models)
        return "hook"
    if weighting == "loss" or all(map(is_sharded, models)):
        return "loss"
    if world_size == 1:
        return "none"
    other = next(model for model, is_ddp in zip(models, are_ddp, strict=True) if not (is_ddp or is_sharded(model)))
    raise ValueError(
        f"nothing averages the gradients of {type(other).__name__} over {world_size} ranks: wrap it, model = "
        'DistributedDataParallel(model), or, where a framework averages them, attach with weighting="loss" and call '
        "session.scale_loss(loss).backward()"
    )


def _refuse_engine(model: torch.nn.Module) -> None:
    if any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__):
        raise ValueError(
            f"{type(model).__name__}: DeepSpeed's engine accumulates, averages and updates by a batch size of its own, "
            "the same for every rank, so unequal batches would get wrong weights: train with DistributedDataParallel "
            "or FSDP2 (fully_shard)"
        )


def _refuse_sparse_gradients(models: Sequence[torch.nn.Module]) -> None:
    for name, module in (found for model in models for found in unwrapped(model).named_modules()):
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name} is an {type(module).__name__} with sparse=True, whose gradients a communication hook cannot "
                "weigh: use sparse=False, with exchange=Exchange(codec='rows') to send the touched rows only, or "
                'weighting="loss" and session.scale_loss(loss).backward()'
            )


def world_size_of(models: Sequence[torch.nn.Module], launched: int) -> int:
    """Size of the world, of which a launcher started `launched` processes; with DDP it must be the models'."""
    if not (dist.is_available() and dist.is_initialized()):
        if launched > 1:
            raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
        return 1
    world_size = dist.get_world_size()
    for model in models:
        if isinstance(model, DistributedDataParallel) and dist.get_world_size(model.process_group) != world_size:
            raise ValueError(
                f"the model spans {dist.get_world_size(model.process_group)} of {world_size} ranks: data parallelism "
                "over a part of the ranks is not supported"
            )
    return world_size


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP, of either version, averages the gradients of a model or of a part of it."""
    names = {"FullyShardedDataParallel", "FSDPModule"}
    return any(cls.__name__ in names for module in model.modules() for cls in type(module).__mro__)


def set_gradient_sync(model: torch.nn.Module, *, exchanged: bool) -> None:
    """Make the next backward pass exchange gradients, or only accumulate them."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = exchanged
    elif callable(switch := getattr(model, "set_requires_gradient_sync", None)):  # FSDP2
        switch(exchanged)


class UncoveredModels:
    """Refuses to train a DDP model that no session covers: with unequal batches its gradients would be wrong."""

    def __init__(self, covered: Sequence[torch.nn.Module]) -> None:
        """`covered` may grow; watched are the models there are, and those that are made until `remove`."""
        self._covered = covered
        self.ignored: list[torch.nn.Module] = []
        self._handles: list[RemovableHandle] = [
            register_module_module_registration_hook(SessionHook(self, _watch_registered))
        ]
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel):
                self.watch(found)

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, model: torch.nn.Module) -> None:
        """Look at a model whenever it is called, unless it is covered."""
        if not self._covers(model):
            self._handles.append(model.register_forward_pre_hook(SessionHook(self, UncoveredModels.refuse)))

    def refuse(self, model: torch.nn.Module, _inputs: Any = None) -> None:
        """Raise RuntimeError when the model is trained and still not covered."""
        if model.training and torch.is_grad_enabled() and not self._covers(model):
            raise RuntimeError(
                "a second DistributedDataParallel model is trained, which the session does not weigh: pass all models "
                "and optimizers to attach as lists, or call session.cover(model, optimizer); one that has batches of "
                "its own, equally long on all ranks, is left alone after session.ignore(model)"
            )

    def _covers(self, model: torch.nn.Module) -> bool:
        return any(model is each for each in (*self._covered, *self.ignored))


class SessionHook:
    """A hook on a user's model: keeps no session alive, and copies and pickles as one that does nothing."""

    def __init__(self, owner: object, function: Callable[..., None]) -> None:
        """`function` is called with the owner first, as long as that lives."""
        self._owner = weakref.ref(owner)
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Call the function, if the owner lives."""
        if (alive := self._owner()) is not None:
            self._function(alive, *arguments)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        """A copied model belongs to no session."""
        return _no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_no_hook, ()


def _no_hook(*_: object) -> None:
    """What a copied model calls."""


def _make_no_hook() -> Callable[..., None]:
    return _no_hook


def _watch_registered(watcher: UncoveredModels, parent: torch.nn.Module, name: str, _child: Any) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        watcher.watch(parent)
