"""The user's models: unwrapped, and told apart by who averages their gradients.

A model under `DistributedDataParallel` is weighed by its communication hook, one under FSDP2 by its reduce-scatter
(`shards.py`). Where neither can be replaced (FSDP1, GPUs) the loss is scaled. Any other model in a world of several
ranks is refused, unless the script says that a framework averages its gradients: unweighted or unaveraged gradients
train wrong without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.exchange.transport import timeout_of

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
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer and wraps none: pass model, optimizer and "
            "data set in this order"
        )
    return optimizer


def sharded_groups(model: torch.nn.Module) -> dict[Any, Any]:
    """FSDP2's groups of parameters, each reduced in one tensor, and the module that `fully_shard` was called on."""
    found: dict[Any, Any] = {}
    for module in model.modules():
        state = module._get_fsdp_state() if callable(getattr(module, "_get_fsdp_state", None)) else None  # noqa: SLF001
        for group in getattr(state, "_fsdp_param_groups", ()):
            found.setdefault(group, module)
    return found


class Layout(NamedTuple):
    """Where the shards of an FSDP2 model lie, and their copies."""

    inside: tuple[int, ...]
    """The ranks that hold one copy of the model together."""
    shard_group: dist.ProcessGroup
    sums_copies: bool
    """Whether FSDP2 sums the copies itself (HSDP on a mesh of two dimensions)."""
    peers: tuple[int, ...] = ()
    """The ranks that hold the same shard of every copy, this one among them; empty unless we sum them."""
    peer_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self | str:
        """The layout of a model as far as this rank knows it, or why only its loss can be weighed.

        Raises:
            ValueError: when nothing would average its gradients over all ranks.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - 0.2 s that DDP does not need

        groups, world_size = sharded_groups(model), dist.get_world_size()
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        sharded = [each for _, each in trained if isinstance(each, DTensor)]
        if not groups or not sharded:
            return "it is not sharded by fully_shard of torch 2.13"
        mesh = sharded[0].device_mesh
        kinds = {tuple(type(each) for each in parameter.placements) for parameter in sharded}
        sums_copies = kinds == {(Replicate, Shard)}
        if not (sums_copies or kinds == {(Shard,)}):
            raise ValueError(
                f"{type(model).__name__}: parameters are placed as {sharded[0].placements}: tensor parallelism is not "
                "supported, call fully_shard alone"
            )
        if any(each.device_mesh != mesh for each in sharded) or (sums_copies and mesh.size() != world_size):
            raise ValueError(
                f"{type(model).__name__}: fully_shard with one mesh for all modules; of two dimensions, with all "
                f"{world_size} ranks"
            )
        reason = _only_loss(model, groups, [name for name, each in trained if not isinstance(each, DTensor)])
        if mesh.device_type != "cpu":
            reason = "on a GPU computing and waiting cannot be told apart"
        elif mesh.size() == 1 < world_size:
            reason = "each rank has the whole model: wrap it in DistributedDataParallel instead"
        if reason and mesh.size() < world_size:
            raise ValueError(
                f"{type(model).__name__} is sharded over {mesh.size()} of {world_size} ranks, and its copies cannot be "
                f"averaged here: {reason}"
            )
        shard_group = mesh.get_group(1 if sums_copies else 0)
        return reason or cls(tuple(dist.get_process_group_ranks(shard_group)), shard_group, sums_copies)

    @property
    def has_copies(self) -> bool:
        """Whether there are copies for us to sum."""
        return not self.sums_copies and len(self.inside) < dist.get_world_size()

    def met(self, model: torch.nn.Module, gather: Callable[[Any], Sequence[Any]]) -> Self:
        """The layout with the ranks of the other copies, which take over the first one's parameters; a collective.

        Raises:
            ValueError: on all ranks, when the meshes do not divide the ranks into copies of one model.
        """
        if not self.has_copies:
            return self
        shapes = [(name, tuple(each.shape)) for name, each in model.named_parameters()]
        everybody = gather((self.inside, shapes))
        copies = sorted({inside for inside, _ in everybody})
        is_divided = sorted(rank for each in copies for rank in each) == list(range(len(everybody)))
        if not is_divided or len({len(each) for each in copies}) > 1 or any(each != shapes for _, each in everybody):
            raise ValueError(
                f"the ranks shard over {[list(each) for each in copies[:4]]}, which are not copies of one model: pass "
                'mesh["shard"] of init_device_mesh(device, (nodes, ranks), mesh_dim_names=("node", "shard"))'
            )
        whole: Any = dist.group.WORLD
        columns = list(zip(*copies, strict=True))
        groups = [dist.new_group(list(each), backend="gloo", timeout=timeout_of(whole)) for each in columns]
        place = self.inside.index(dist.get_rank())
        for each in (*model.parameters(), *model.buffers()):
            if (part := local(each.detach())).numel():
                dist.broadcast(part, columns[place][0], group=groups[place])
        return self._replace(peers=columns[place], peer_group=groups[place])


def _only_loss(model: torch.nn.Module, groups: Mapping[Any, Any], loose: Sequence[str]) -> str:
    """Why the reduce-scatter of these groups cannot be replaced, if so; `loose` parameters are not sharded."""
    if loose or not callable(getattr(model, "set_custom_reduce_scatter", None)):
        return f"{loose[0] if loose else 'a module'} is not sharded: call fully_shard on the model itself too"
    if any(len(module._get_fsdp_state()._fsdp_param_groups) > 1 for module in groups.values()):  # noqa: SLF001
        return "its modules have several groups of parameters (shard_placement_fn)"
    if any(group.gradient_divide_factor not in (None, 1.0) for group in groups):
        return "it has a gradient_divide_factor"
    return ""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or all of one that is not sharded."""
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return shard


def is_weighed(model: torch.nn.Module, world_size: int) -> bool:
    """Whether a hook of ours can weigh the gradients of a model."""
    if isinstance(model, DistributedDataParallel):
        return True
    return world_size > 1 and is_sharded(model) and isinstance(Layout.of(model), Layout)


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
    for model in models:
        if any(cls.__name__ == "DeepSpeedEngine" for cls in type(model).__mro__):
            raise ValueError(
                f"{type(model).__name__}: DeepSpeed's engine accumulates, averages and updates by a batch size of its "
                "own, the same for every rank, so unequal batches would get wrong weights: train with "
                "DistributedDataParallel or FSDP2 (fully_shard)"
            )
    are_ddp = [isinstance(model, DistributedDataParallel) for model in models]
    are_weighed = weighting != "loss" and all(is_weighed(model, world_size) for model in models)
    if weighting == "hook" and not are_weighed:
        raise ValueError(
            'weighting="hook" needs a DistributedDataParallel model, or fully_shard on CPUs: use weighting="loss"'
        )
    if are_weighed:
        with_copies = [is_replicated(model) and not is_ddp for model, is_ddp in zip(models, are_ddp, strict=True)]
        if any(with_copies) and not all(with_copies):
            raise ValueError("models with copies between nodes and others exclude each other: shard all on one mesh")
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
    return all(group.reduce_grads for group in sharded_groups(model))


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
