"""The user's models: unwrapped, and told apart by who averages their gradients.

A model under `DistributedDataParallel` is weighed by its communication hook, one under FSDP2 by its reduce-scatter
(`shards.py`). Where neither can be replaced (FSDP1, GPUs) the loss is scaled. Any other model in a world of several
ranks is refused, unless the script says that a framework averages its gradients: unweighted or unaveraged gradients
train wrong without a word.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.arguments import checked
from dynamix.trainer.exchange.layout import Layout, sharded_groups

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
    """The optimizer inside the wrappers of Accelerate and Lightning. Raises TypeError when there is none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer and wraps none: pass model, optimizer and "
            "data set in this order"
        )
    return optimizer


def is_weighed(model: torch.nn.Module) -> bool:
    """Whether a hook of ours can weigh the gradients of a model."""
    return isinstance(model, DistributedDataParallel) or (is_sharded(model) and isinstance(Layout.of(model), Layout))


def is_replicated(model: torch.nn.Module) -> bool:
    """Whether our hook sends gradients between copies of a model; FSDP2's own sums can only be weighed."""
    if isinstance(model, DistributedDataParallel) or not is_sharded(model):
        return True
    layout = Layout.of(model)
    return isinstance(layout, Layout) and layout.has_copies


def averaging_of(models: Sequence[torch.nn.Module], weighting: Weighting, world_size: int) -> Averaging:
    """The averaging that weights the gradients of these models.

    Raises:
        ValueError: when nothing would average them over the ranks, hooks are asked for without DDP, or an engine would
            weigh them on its own.
    """
    checked("weighting", weighting, Weighting)
    for model in models:
        if any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__):
            raise ValueError(
                f"{type(model).__name__}: DeepSpeed's engine accumulates, averages and updates by a batch size of its "
                "own, the same for every rank, so unequal batches would get wrong weights: train with "
                "DistributedDataParallel or FSDP2 (fully_shard)"
            )
    are_ddp = [isinstance(model, DistributedDataParallel) for model in models]
    are_weighed = weighting != "loss" and all(map(is_weighed, models))
    if weighting == "hook" and not are_weighed:
        raise ValueError(
            'weighting="hook" needs a DistributedDataParallel model, or fully_shard on CPUs: use weighting="loss"'
        )
    if are_weighed:
        for name, module in (found for model in models for found in unwrapped(model).named_modules()):
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
                raise ValueError(
                    f"{name} is an {type(module).__name__} with sparse=True, whose gradients a communication hook "
                    "cannot weigh: use sparse=False, with exchange=Exchange(codec='rows') to send the touched rows "
                    'only, or weighting="loss" and session.scale_loss(loss).backward()'
                )
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


def exchanges_gradient(model: Any) -> bool:
    """Whether the next backward pass exchanges the gradient of a model that hooks weigh."""
    if isinstance(model, DistributedDataParallel):
        return bool(model.require_backward_grad_sync)
    if not hasattr(model, "_get_fsdp_state"):
        return True
    groups = model._get_fsdp_state()._fsdp_param_groups or sharded_groups(model)  # noqa: SLF001
    return all(group.reduce_grads for group in groups)


def accumulated(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients that were added up and not exchanged yet; FSDP2 keeps them whole."""
    found = [each.grad for each in model.parameters()]
    for group in sharded_groups(model):
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            found += [each.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [each for each in found if each is not None]


def needs_equal_steps(models: Sequence[torch.nn.Module]) -> bool:
    """Whether every forward pass is a collective, so that all ranks need equally many: sharding, SyncBatchNorm."""
    return any(
        isinstance(module, torch.nn.SyncBatchNorm) or not isinstance(model, DistributedDataParallel)
        for model in models
        for module in model.modules()
    )


def check_accumulation(averaging: Averaging, models: Sequence[torch.nn.Module], *, counts_in_batches: bool) -> None:
    """Raise ValueError where gradients of micro-batches cannot be added up, saying how to fix it."""
    if any(getattr(model, "static_graph", False) for model in models):
        raise ValueError(
            "gradient accumulation and DistributedDataParallel(static_graph=True) exclude each other, as under plain "
            "DDP: leave static_graph out"
        )
    if counts_in_batches and averaging != "hook":
        raise ValueError(
            "count_tokens with gradient accumulation needs a DistributedDataParallel model: elsewhere the tokens of "
            "all micro-batches must be known before the first one, pass token_counts"
        )
