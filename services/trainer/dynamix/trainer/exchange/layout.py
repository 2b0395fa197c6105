"""Where the shards of an FSDP2 model lie, and its copies: over all ranks, or one copy on each node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from .transport import timeout_of


def sharded_groups(model: torch.nn.Module) -> dict[Any, Any]:
    """FSDP2's groups of parameters, each reduced in one tensor, and the module that `fully_shard` was called on."""
    found: dict[Any, Any] = {}
    for module in model.modules():
        state_of: Any = getattr(module, "_get_fsdp_state", None)
        for group in getattr(state_of and state_of(), "_fsdp_param_groups", ()):
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
    columns: Sequence[tuple[int, ...]] = ()
    """The peers of every shard."""

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
        if not sharded:
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
        loose = [name for name, each in trained if not isinstance(each, DTensor)]
        reason = _only_loss(model, groups, loose) if groups else "torch's FSDP2 is another one than that of torch 2.13"
        if mesh.device_type != "cpu":
            reason = "on a GPU computing and waiting cannot be told apart"
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
        lists = [list(each) for each in columns]
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout_of(whole), "gloo")  # type: ignore[no-untyped-call]
        peers = columns[self.inside.index(dist.get_rank())]
        for each in (*model.parameters(), *model.buffers()):
            if (part := local(each.detach())).numel():
                dist.broadcast(part, peers[0], group=group)
        return self._replace(peers=peers, peer_group=group, columns=columns)


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
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
