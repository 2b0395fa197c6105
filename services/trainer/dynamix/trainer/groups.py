"""Replica groups that come and go under torchft's `Manager`: another world without a restart.

A step is open from `manager.start_quorum`, which the session calls before the step's samples are drawn, to
`manager.should_commit`, which the script calls before its update. What torchft does not commit is repeated, by the
groups that are left and with the same samples. A quorum with another number is another world. Its members tell each
other where they stand, and go on from the state of the one that is furthest: what knows the number of ranks is set
anew, in place, and the job's next generation begins. Gradients, and times behind them, are one sum at the end of the
backward pass. One process is one group. torchft is never imported here.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages.allocation import EXACT
from dynamix.schemas.policies import STIGMERGY
from dynamix.trainer.arguments import AtLeast1, checked
from dynamix.trainer.data.orders import Orders, SampledOrders
from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.exchange.transport import LentTensor, launched
from dynamix.trainer.gradient.hook import GradientHook, _SessionHook, _view, squared_norm
from dynamix.trainer.gradient.models import is_sharded
from dynamix.trainer.job.identity import Peer
from dynamix.trainer.job.options import JobOptions

_log = logging.getLogger("dynamix.trainer")

DEFAULTS: dict[str, object] = {
    "local_batch_size": None,
    "micro_batch_size": None,
    "gradient_accumulation_steps": 1,
    "look_ahead": 0,
    "reduction": "mean",
    "weighting": "auto",
    "base_hook": None,
    "exchange": "exact",
    "explores": (),
    "count_tokens": None,
    "memory_caps_path": None,
}
"""Arguments of `attach` that must stay as they are."""

MOST_REASON = 200
"""Characters of an error in the log."""


class Groups:
    """The groups of a job, as torchft's Manager knows them."""

    meet: Callable[..., Any]
    """Gathers what all members of a new world say of themselves; a collective."""
    make_transport: Callable[..., Any]
    """Makes the transport for a place in it."""

    def __init__(
        self,
        manager: Any,
        given: Mapping[str, Any],
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Join the other groups; `given` are the arguments of `attach`.

        Raises:
            ValueError: for what cannot work under a Manager, with the fix.
        """
        self._manager = manager
        self._size = size = given["base_global_batch_size"]
        widest = size if given["global_batch"] == "fixed" else max(size or 1, 1024)
        self.most = given["max_local_batch_size"] or widest
        data = given["data"]
        sampler = data.sampler if isinstance(data, DataLoader) else None
        other = [f"{name}={given[name]!r}" for name, default in DEFAULTS.items() if given[name] != default]
        faults = {
            f"{', '.join(other)} cannot be used: leave it out": bool(other),
            "base_global_batch_size must be the samples of a step over all groups, whose number changes": not size,
            "use_async_quorum must be False: samples are drawn for those who take part": manager._use_async_quorum,  # noqa: SLF001
            "world_size_mode must be DYNAMIC, without spares": manager._replica_world_size_mode.name != "DYNAMIC",  # noqa: SLF001
            "a group must be one process: start each with --nproc-per-node 1": manager._group_world_size > 1,  # noqa: SLF001
            "the process group must be torchft's ProcessGroupGloo": type(manager._pg).__name__ != "ProcessGroupGloo",  # noqa: SLF001
            "the model must be the plain module, not one under DDP or FSDP": any(
                isinstance(each, DistributedDataParallel) or is_sharded(each) for each in models
            ),
            "the model must be on the CPU": any(each.is_cuda for model in models for each in model.parameters()),
            "the optimizer must be the one inside of torchft's Optimizer: call its step() if manager.should_commit()": (
                any(hasattr(each, "manager") for each in optimizers)
            ),
            "a stream cannot be used: pass a data set with __getitem__": isinstance(
                data.dataset if isinstance(data, DataLoader) else data, IterableDataset
            ),
            "the loader needs shuffle=True or a sampler of all samples: the session gives each group its part": (
                isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
            ),
        }
        for fault, holds in faults.items():
            if holds:
                raise ValueError(f"under a torchft Manager {fault}")
        checked("base_global_batch_size", size, AtLeast1)
        fewest = manager._min_replica_size  # noqa: SLF001
        if fewest * self.most < size:
            raise ValueError(
                f"min_replica_size={fewest} groups of at most {self.most} samples cannot compute a step of {size}: "
                "raise max_local_batch_size or min_replica_size"
            )
        self.member = uuid.uuid4().hex
        """Name of this process; one that comes back is another member."""
        self.state: dict[str, Any] | None = None
        """The session's state that the members go on from; `None` at the beginning of the job."""
        self.known: list[int | None] = []
        """The rank that each member had in that state's world; `None` for one that was not in it."""
        self.members: list[str] = []
        self.num_repeated = 0
        """Steps of this process that were not committed, and so were made again."""
        self._is_open = False
        self._quorum = self._step = -1
        self.open()

    def open(self) -> bool:
        """Open the next step, where none is open; returns whether its world is another one. Waits for the others.

        Raises:
            RuntimeError: when a group was lost meanwhile.
        """
        if self._is_open:
            return False
        manager, before = self._manager, self._quorum
        manager.start_quorum()
        self._is_open, self._step, self._quorum = True, manager.current_step(), manager._quorum_id  # noqa: SLF001
        if (error := manager.errored()) is not None:
            raise RuntimeError(f"torchft: {error}")
        return bool(before != self._quorum)

    def close(self) -> None:
        """The step that was open is done."""
        self._is_open = False

    def give_up(self, error: BaseException) -> None:
        """Something that the session sends has failed: end the open step without a commit; all will meet again."""
        _log.warning("step %d: a group was lost between steps, those that are left meet again: %s", self._step, error)
        self._manager.report_error(error)
        self._manager.should_commit()
        self._is_open, self._quorum = False, -1

    def repeat(self, step: int, num_samples: int) -> None:
        """Count a step that was not committed."""
        self.num_repeated += 1
        self._is_open = False
        error = self._manager.errored()
        reason = str(error.original_exception)[:MOST_REASON] if error else "manager.should_commit() was false"
        _log.warning(
            "step %d was not committed (%s): its %d samples are used again; %d steps were repeated so far",
            *(step, reason, num_samples, self.num_repeated),
        )

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
        return apportion(self._size, [1.0] * number, [0] * number, [self._size] * number)

    def check_options(self, options: JobOptions, orders: Orders) -> None:
        """Raise ValueError for a policy or an exchange that needs the same ranks throughout."""
        if options.policy == STIGMERGY or options.initial_allocation.exchange != EXACT:
            raise ValueError(
                "under a torchft Manager gradients are exchanged exactly, and no agents decide: use another policy, "
                "leave codec, every and route out of its options, and DYNAMIX_TRAINER_GRADIENT_SERVERS unset"
            )
        if isinstance(orders, SampledOrders):  # drawn by each group: they compare their seeds
            orders.identity = orders.identity._replace(seed=orders.seed)

    def choose(self, peers: Sequence[Peer]) -> None:
        """Choose the state to go on from: the one with most steps, of the lowest rank."""
        held = [peer.held for peer in peers if peer.held is not None]
        best = max(held, key=lambda each: each[0]["position"]["step"], default=None)
        before: Sequence[str] = () if best is None else best[1]
        self.state = None if best is None else best[0]
        self.members = [peer.member for peer in peers]
        self.known = [before.index(each) if each in before else None for each in self.members]
        if self.state is not None:
            self.state["generation"] = max(state["generation"] for state, _ in held)

    def sum(self, numbers: torch.Tensor) -> None:
        """Add up numbers over the groups, in place; after an error they are anything, and the step is not committed."""
        self._manager.allreduce(numbers, reduce_op=dist.ReduceOp.SUM).wait()


@dataclass(kw_only=True, eq=False)
class GroupHook(GradientHook):
    """Weighs the gradients of a plain module, and sums them at the end of the backward pass."""

    groups: Groups
    parameters: list[torch.nn.Parameter] = field(init=False)
    _lent: LentTensor | None = field(default=None, init=False)
    """Gradients of all parameters, then the time of each rank."""
    _is_queued: bool = field(default=False, init=False)

    def _install(self, model: Any, place: Any) -> None:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(_SessionHook(place, lambda place, _: place.hook.note_gradient()))

    def register(self, model: Any) -> None:
        """As under DDP."""
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        super().register(model)

    def enter_world(self) -> None:
        """Be one of another number of ranks."""
        super().enter_world()
        self._lent = None  # a group that was lost may still write into the last one

    def begin(self, batch: MicroBatch, *arguments: Any, **options: Any) -> None:
        """Begin a step, as under DDP."""
        super().begin(batch, *arguments, **options)
        self._is_queued = False

    def note_gradient(self) -> None:
        """A parameter has its gradient: have the engine call us at the end of the backward pass."""
        if self._step.in_step and not self._is_queued and not self.is_retired:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)  # noqa: SLF001

    def _finish_pass(self) -> None:  # noqa: C901 - from gradients to their sum, in order
        began, step, self._is_queued = time.perf_counter(), self._step, False
        if self.losses is not None:
            self.losses.gradient_begins()
        self.clock.gradient_ready()
        lengths = [each.numel() for each in self.parameters]
        if self._lent is None:
            types = {each.dtype for each in self.parameters} - {torch.float16, torch.bfloat16}
            dtype = max(types, key=str, default=None)
            self._lent = LentTensor(torch.zeros(sum(lengths) + self._world_size, dtype=dtype))
        flat = self._lent.tensor
        *parts, _ = torch.split(flat, [*lengths, self._world_size])
        gradients, room = flat[: sum(lengths)], _view(flat[sum(lengths) :])
        for part, parameter in zip(parts, self.parameters, strict=True):
            part.zero_() if parameter.grad is None else part.copy_(parameter.grad.flatten())
        if step.measures:
            step.local[0] = squared_norm(gradients) if step.scale else 0.0
        if step.scale:
            gradients.mul_(step.scale)
        else:
            gradients.zero_()  # not times zero: a dummy batch may have made it NaN
        self.slots.write(self.clock.seconds_per_sample(), room)
        self.clock.own_s += time.perf_counter() - began
        launched(self.groups.sum, self._lent.alias)
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        self.clock.reduced()
        if step.shares_times:
            self.slots.receive()
        if step.measures:
            step.reduced[0] = squared_norm(gradients)
        for part, parameter in zip(parts, self.parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif part.any():  # another group's samples have used it
                parameter.grad = part.to(parameter.dtype, copy=True).view_as(parameter)
        self.clock.own_s += time.perf_counter() - self.reduced_at
