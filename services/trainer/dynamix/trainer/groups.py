"""Replica groups that come and go under torchft's `Manager`: another world without a restart.

A step is open from `manager.start_quorum`, which the session calls before the step's samples are drawn, to
`manager.should_commit`, which the script calls before its update. What torchft does not commit is repeated, by the
groups that are left and with the same samples. A quorum with another number is another world. Its members tell each
other where they stand, and go on from the state of the one that is furthest: what knows the number of ranks is set
again, in place, and the job's next generation begins. Gradients, and times behind them, are one sum at the end of the
backward pass. One process is one group. torchft is never imported here.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from dynamix.schemas.messages.allocation import EXACT
from dynamix.schemas.policies import STIGMERGY
from dynamix.trainer.arguments import AtLeast1, checked
from dynamix.trainer.data.orders import Orders, SampledOrders
from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.codec import HALF_TYPES
from dynamix.trainer.gradient.hook import GradientHook, _SessionHook
from dynamix.trainer.gradient.models import is_sharded
from dynamix.trainer.job.identity import Peer
from dynamix.trainer.job.options import JobOptions

_log = logging.getLogger("dynamix.trainer")

FIXED = (
    *("local_batch_size", "micro_batch_size", "gradient_accumulation_steps", "look_ahead", "reduction", "weighting"),
    *("base_hook", "exchange", "explores", "count_tokens", "memory_caps_path"),
)
"""Arguments of `attach` that keep their defaults."""


MOST_LOST = 10
"""Times that the members meet again at one step, before the error counts as one that stays."""


class Groups:
    """The groups of a job, as torchft's Manager knows them."""

    meet: Callable[..., Any]
    """Gathers what all members of a new world say of themselves; a collective."""
    make_transport: Callable[..., Any]
    """Makes the transport for a place in it."""

    def __init__(
        self,
        manager: Any,
        given: dict[str, Any],
        defaults: Mapping[str, Any],
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Join the other groups; `given` are the arguments of `attach`, which get the sizes.

        Raises:
            ValueError: for what cannot work under a Manager, with the fix.
        """
        self._manager = manager
        self._lost: list[int] = []
        """The newest step, as often as it failed."""
        self._size = size = given["base_global_batch_size"]
        data, most = given["data"], given["max_local_batch_size"]
        dataset, sampler = (data.dataset, data.sampler) if isinstance(data, DataLoader) else (data, None)
        others = ", ".join(f"{name}={given[name]!r}" for name in FIXED if given[name] != defaults[name])
        faults = {
            f"leave {others} out": bool(others),
            "name base_global_batch_size, the samples of a step over all groups, whose number changes": not size,
            "name a max_local_batch_size with which min_replica_size groups can compute a step, or none": (
                most == "auto" or (most or size or 0) * manager._min_replica_size < (size or 0)  # noqa: SLF001
            ),
            "pass use_async_quorum=False, the default world_size_mode and torchft's ProcessGroupGloo to the Manager, "
            "and start each group with --nproc-per-node 1": (
                manager._use_async_quorum  # noqa: SLF001
                or manager._replica_world_size_mode.name != "DYNAMIC"  # noqa: SLF001
                or manager._group_world_size > 1  # noqa: SLF001
                or type(manager._pg).__name__ != "ProcessGroupGloo"  # noqa: SLF001
            ),
            "pass the plain module, on the CPU, without DDP or FSDP": any(
                isinstance(model, DistributedDataParallel) or is_sharded(model) or next(model.parameters()).is_cuda
                for model in models
            ),
            "pass the optimizer that is inside of torchft's, and call its step() if manager.should_commit()": any(
                hasattr(each, "manager") for each in optimizers
            ),
            "pass a data set with __getitem__, and no DistributedSampler: the session gives each group its part": (
                isinstance(dataset, IterableDataset) or getattr(sampler, "num_replicas", 1) > 1
            ),
        }
        for fault, holds in faults.items():
            if holds:
                raise ValueError(f"under a torchft Manager: {fault}")
        checked("base_global_batch_size", size, AtLeast1)
        most = most or (size if given["global_batch"] == "fixed" else max(size, 1024))
        self.state: dict[str, Any] | None = None
        """The session's state that the members go on from; `None` at the beginning of the job."""
        self.known: list[int | None] = []
        """The rank that each member had in that state's world; `None` for one that was not in it."""
        self.members: list[Any] = []
        """Node and process of each rank; one that comes back is another member."""
        self.is_open = False
        """Whether a step is; the session closes it."""
        self._quorum = self._step = -1
        self.open()
        given |= {"local_batch_size": self.sizes, "max_local_batch_size": most}

    def open(self) -> bool:
        """Open the next step, where none is open; returns whether its world is another one. Waits for the others.

        Raises:
            RuntimeError: when a group was lost meanwhile.
        """
        if self.is_open:
            return False
        manager, before = self._manager, self._quorum
        manager.start_quorum()
        self.is_open, self._step, self._quorum = True, manager.current_step(), manager._quorum_id  # noqa: SLF001
        if (error := manager.errored()) is not None:
            raise RuntimeError(f"torchft: {error}")
        return bool(before != self._quorum)

    def give_up(self, error: BaseException) -> None:
        """Something that the session sends has failed: end the open step without a commit; all will meet again.

        Raises:
            RuntimeError: when meeting again did not help.
        """
        self._lost = [step for step in self._lost if step == self._step] + [self._step]
        if len(self._lost) > MOST_LOST:
            raise RuntimeError(f"step {self._step} failed {MOST_LOST} times between steps: {error}") from error
        _log.warning("step %d: a group was lost between steps, those that are left meet again: %s", self._step, error)
        self._manager.report_error(error)
        self._manager.should_commit()
        self.is_open, self._quorum = False, -1

    @property
    def reason(self) -> str:
        """Why the open step was not committed."""
        error = self._manager.errored()
        return str(error.original_exception).partition("\n")[0] if error else "manager.should_commit() was false"

    @property
    def is_committed(self) -> bool:
        """Whether torchft has committed the open step."""
        return bool(self._manager.current_step() > self._step)

    def check_update(self) -> None:
        """Raise RuntimeError if an optimizer steps without a commit."""
        if not self.is_committed:
            raise RuntimeError("optimizer.step() without a commit: call it only if manager.should_commit()")

    @property
    def group(self) -> Any:
        """The process group of this world."""
        return self._manager._pg.parent  # noqa: SLF001 - works of the wrapper do not raise

    @property
    def sizes(self) -> tuple[int, ...]:
        """The global batch in equal parts."""
        number = self.group.size()
        return tuple((self._size + rank) // number for rank in range(number))

    def check_options(self, options: JobOptions, orders: Orders) -> None:
        """Raise ValueError for a policy or an exchange that needs the same ranks throughout."""
        if options.policy == STIGMERGY or options.initial_allocation.exchange != EXACT:
            raise ValueError(
                "under a torchft Manager gradients are exchanged exactly, and no agents decide: use another policy, "
                "leave codec, every and route out of its options, and DYNAMIX_TRAINER_GRADIENT_SERVERS unset"
            )
        if isinstance(orders, SampledOrders):  # drawn by each group: they compare their seeds
            orders.identity = orders.identity._replace(seed=orders.seed)

    def choose(self, peers: list[Peer]) -> None:
        """Choose the state to go on from, that with most steps of the lowest rank, and tell its job and generation."""
        held = [peer.held for peer in peers if peer.held is not None]
        self.state, before = max(held, key=lambda each: each[0]["position"]["step"], default=(None, []))
        self.members = [(peer.node, peer.process) for peer in peers]
        self.known = [before.index(each) if each in before else None for each in self.members]
        if self.state is not None:
            newest = max(state["generation"] for state, _ in held)
            peers[0] = peers[0]._replace(job=self.state["job"], last_generation=newest)

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        """Add up numbers over the groups, in place; after an error they are anything, and the step is not committed."""
        self._manager.allreduce(tensors[0], reduce_op=dist.ReduceOp.SUM).wait()


@dataclass(kw_only=True, eq=False)
class GroupHook(GradientHook):
    """Weighs the gradients of a plain module, and sums them at the end of the backward pass, as one bucket."""

    parameters: list[torch.nn.Parameter]
    _flat: torch.Tensor | None = field(default=None, init=False)
    """Gradients of all parameters."""
    _is_queued: bool = field(default=False, init=False)

    def _install(self, model: Any, place: Any) -> None:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(_SessionHook(place, lambda place, _: place.hook.note_gradient()))

    def enter_world(self) -> None:
        """Be one of another number of ranks."""
        super().enter_world()
        self._flat = None  # a group that was lost may still write into the last one

    def begin(self, batch: MicroBatch, *arguments: Any, **options: Any) -> None:
        """Begin a step, as under DDP."""
        super().begin(batch, *arguments, **options)
        self._is_queued = False

    def note_gradient(self) -> None:
        """A parameter has its gradient: have the engine call us at the end of the backward pass."""
        if self._step.in_step and not self._is_queued and not self.is_retired:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)  # noqa: SLF001

    def _finish_pass(self) -> None:
        self._is_queued = False
        lengths = [each.numel() for each in self.parameters]
        if self._flat is None:
            types = {each.dtype for each in self.parameters} - {*HALF_TYPES}
            self._flat = torch.zeros(sum(lengths), dtype=max(types, key=str, default=None))
        flat = self._flat
        pairs = [*zip(torch.split(flat, lengths), self.parameters, strict=True)]
        for part, parameter in pairs:
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad.flatten())
        bucket: Any = SimpleNamespace(buffer=lambda: flat, index=lambda: 0, is_last=lambda: True)
        self.reduce(bucket)
        for part, parameter in pairs:
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif part.any():  # another group's samples have used it
                parameter.grad = part.to(parameter.dtype, copy=True).view_as(parameter)
