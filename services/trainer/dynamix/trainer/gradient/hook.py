"""Exact weighting: g = sum_i (b_i / B) g_i, whatever the local batch sizes.

Under DDP a communication hook weighs each bucket, measures it (|g_i|^2, on some steps) and sends it: over all ranks, by
an exchange, or nowhere in a local step. The last bucket's hook waits for all and measures |G|^2. Elsewhere the loss
itself is scaled (`loss_factor`). Where the script counts in its batches (`attach(count_tokens=...)`) the total over all
ranks is one more all-reduce; until it is there, gradients are divided by the total of the step before.

A step may exchange gradients of several models, and of one several times. All weigh by the same plan; compute times
come with every exchange, and those of the step's last one count.
"""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dynamix.trainer.data.plan import MicroBatch, StepPlan
from dynamix.trainer.exchange.codec import HALF_TYPES, BucketPart, BucketView, CodedSquares
from dynamix.trainer.exchange.plan import ExchangePlan, ModelExchange, Sent, StepExchange
from dynamix.trainer.exchange.transport import LentTensor, launched

from .clock import Clock
from .losses import LossWarnings
from .models import accumulated, exchanges_gradient, is_sharded, is_weighed, set_gradient_sync
from .noise import NOT_MEASURED, NormSketch, SquaredNorms, StepSketches

_log = logging.getLogger("dynamix.trainer")

Reduction = Literal["mean", "sum"]
"""How the user's loss combines the samples of its batch."""

BaseHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""A DDP communication hook that averages over ranks, as torch's own do."""


@dataclass
class StepWeights:
    """The weights of the current step on this rank."""

    post_total: Callable[[int], Callable[[], int]] | None
    """Begins to add up a number over all ranks, and returns what waits for the sum; `None` where the plan knows all."""
    base_size: float | None
    """For losses that are a sum, a batch of the script as it was written for: plain DDP divides by the ranks, and the
    script by its accumulation steps, so a gradient stays as large as with that batch."""
    newest: int = 0
    """Weight of the newest micro-batch that has one: the scale in which gradients are added up."""
    mine: int = 0
    """Weight of the micro-batches so far."""
    expected: int = 0
    """The total over all ranks, or the last one known; equal on all ranks."""
    _size: int = 1
    _posted: Callable[[], int] | None = None
    _total: int | None = None

    def begin(self, batch: MicroBatch) -> int | None:
        """Begin a batch; returns the weight of the gradients accumulated so far, `None` if there are none."""
        before = self.newest
        if batch.is_first:
            self._size = batch.plan.counts.total
            known = None if self.post_total is None else self._total or self.expected
            self.expected = known or self._size
            self._posted = self._total = None
            self.mine, self.newest = batch.weight, batch.weight
            return None
        self.mine += batch.weight
        self.newest = batch.weight or before
        return before

    def post(self) -> None:
        """Tell all ranks the weight of this rank's step; a collective call where the script counts."""
        if self.post_total is not None and self._posted is None:
            self._posted = self.post_total(self.mine)

    def total(self) -> int:
        """The weight of the step on all ranks."""
        if self.post_total is None:
            return self.expected
        self.post()
        if self._total is None:
            assert self._posted is not None, "posted above"
            self._total = self._posted()
        return self._total

    def factor(self) -> float:
        """The factor on gradients that are weighted and summed over all ranks; up to `correction`."""
        return 1.0 / self.expected if self.base_size is None else self.base_size / self._size

    def local_factor(self, total: int) -> float:
        """The factor on this rank's weighted gradient in a local step, for the mean over the samples of its node."""
        return (1.0 if self.base_size is None else self.base_size) / total if total else 0.0

    def correction(self) -> float:
        """Factor on a gradient that was divided by `expected`."""
        if self.post_total is None or self.base_size is not None:
            return 1.0
        total = self.total()
        if total == self.expected:
            return 1.0
        return self.expected / total if total else 0.0

    def over_mean(self) -> float:
        """The gradient of the step over that of a loss that is a mean over what counts; 1 where it is one."""
        return 1.0 if self.base_size is None else self.base_size * self.total() / self._size


class TimeSlots:
    """Seconds per sample of all ranks: each fills its own slot with float32, and one all-reduce adds them up.

    x + 0 is x in every order of additions, so all ranks read the same bits; each derives the split from them alone.
    The slots lie behind the last bucket of a model, in its own storage, where they cost no collective; or apart.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._apart = LentTensor(torch.zeros(world_size))
        self._slots = self._apart.tensor
        """Those that were written last."""
        self._received: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        """The slots that came back; from a GPU on their way to the host, until the event."""
        self._before: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def behind(self, buffer: torch.Tensor) -> tuple[LentTensor, torch.Tensor]:
        """Make room for slots behind a bucket of float32 or float64: both in one tensor, and the slots.

        DDP's views of the bucket stay valid: they share the storage that grows.
        """
        storage, length = buffer.untyped_storage(), buffer.numel() + self._world_size
        assert buffer.storage_offset() == 0, "a bucket has a storage of its own"
        if storage.nbytes() < length * buffer.element_size():  # else an earlier session of the model made room
            storage.resize_(length * buffer.element_size())
        whole = buffer.new_empty(0).set_(storage, 0, (length,))  # type: ignore[call-overload]
        return LentTensor(whole), whole[buffer.numel() :]

    def write(self, seconds_per_sample: float, slots: torch.Tensor) -> None:
        """Fill these slots, which are then to be summed over ranks in place."""
        self._slots = slots.zero_()
        slots[self._rank] = seconds_per_sample

    def write_apart(self, seconds_per_sample: float, device: torch.device | None = None) -> LentTensor:
        """Fill slots that lie apart, on the host unless a `device` is named."""
        if self._apart.tensor.device != (device or torch.device("cpu")):
            self._apart = LentTensor(torch.zeros(self._world_size, device=device))
        self.write(seconds_per_sample, self._apart.tensor)
        return self._apart

    def receive(self) -> None:
        """Take what was written, now summed."""
        slots, arrived = self._slots, None
        if slots.is_cuda:
            slots = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._received = slots, arrived

    def take_seconds(self) -> list[float] | None:
        """Seconds per sample by rank, 0 where unknown, at the end of a step; `None` when none came back.

        On a GPU they are those of the step before, which it has done by now: nothing is waited for.
        """
        received, self._received = self._received, None
        if received is None or received[1] is not None:
            received, self._before = self._before, received
        if received is None:
            return None
        slots, arrived = received
        if arrived is not None:
            arrived.synchronize()
        return slots.tolist()


def squared_norm(gradient: torch.Tensor) -> float | torch.Tensor:
    """|gradient|^2, in float32 where half precision would overflow; a number on the CPU, on a GPU still a tensor."""
    if gradient.dtype in HALF_TYPES:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        squared = norm * norm
    else:
        squared = torch.dot(gradient, gradient)
    return squared if squared.is_cuda else squared.item()


@dataclass(slots=True, eq=False)
class ModelBucket:
    """One bucket of the model, with everything that is the same in every step."""

    number: int
    buffer: torch.Tensor
    lent: LentTensor | None = None
    """The tensor that the process group reduces, after the first use."""
    carrier: tuple[LentTensor, torch.Tensor] | None = None
    """The same with room for times behind it, and that room, after the first use."""
    view: BucketView | None = None
    """The codec's view of it, after the first use."""


def weigh(gradient: torch.Tensor, scale: float) -> None:
    """Scale a gradient in place."""
    if not scale:
        gradient.zero_()  # not times zero: a dummy batch may have made it NaN
    elif scale != 1.0:
        gradient.mul_(scale)


def view_of(bucket: GradBucket, buffer: torch.Tensor, keys: Mapping[torch.Tensor, str]) -> BucketView:
    """A codec's view of a bucket: where each parameter's gradient lies, if its rows are in one piece."""
    parts = []
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = int(part.storage_offset() - buffer.storage_offset())
        has_rows = part.dim() > 1 and part.stride(0) * part.size(0) == part.numel()
        shape = part.shape if has_rows else torch.Size([part.numel()])
        parts.append(BucketPart(keys[parameter], start, start + part.numel(), shape))
    return BucketView(bucket.index(), buffer, tuple(parts))


SLOT_TYPES = (torch.float32, torch.float64)
"""Buckets on the CPU that can carry times; half precision would round them."""

_Reduced = torch.futures.Future[torch.Tensor]
_UnderWay = dist.Work | _Reduced | Sent | None
"""A bucket that is sent; `None` for one that stays on this rank."""


@dataclass(slots=True)
class _Step:
    """Parameters of a step for the hook, and the squared norms that it measured."""

    scale: float
    """Factor on the bucket; 0 zeroes it."""
    exchange: StepExchange | None = None
    """`None` for DDP's own all-reduce."""
    is_local: bool = False
    in_step: bool = False
    """Whether a step of the session is under way."""
    measures: bool = False
    shares_times: bool = False
    """Whether all ranks learn each other's compute times."""
    to_mean: float = 1.0
    """Factor on |g_i|^2 of what was added up, for that of the mean gradient."""
    local: dict[int, float | torch.Tensor] = field(default_factory=dict)
    reduced: dict[int, float | torch.Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class GradientHook:
    """The communication hook of one DDP model, in one session.

    Buckets are scaled and summed over ranks; a base hook averages, so its buckets are scaled N times as much. No thread
    of the process group calls Python, perhaps while the interpreter is being taken down (`LentTensor`): the hook of the
    last bucket waits for all, in the training thread, where DDP itself would wait right after it.
    """

    group: Any
    """The process group of DDP, or what sums in its place."""
    model_exchange: ModelExchange
    """Sends buckets in steps whose exchange is not DDP's own all-reduce."""
    clock: Clock
    weights: StepWeights
    reduction: Reduction
    base_hook: BaseHook | None
    losses: LossWarnings | None
    num_reduced: int = field(default=0, init=False)
    """Gradients exchanged so far: one per step, or more where the script calls `backward` more often."""
    reduced_at: float = field(default=0.0, init=False)
    sketch: NormSketch | None = field(default=None, init=False)
    """The norms of the newest local step, where they are measured; their cells are not summed yet."""
    is_retired: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Average plainly until the first step."""
        has_gloo = isinstance(self.group, dist.ProcessGroup) and "gloo" in dist.get_backend_config(self.group)
        self._gloo: Any = self.group._get_backend(torch.device("cpu")) if has_gloo else None  # noqa: SLF001 - no public name
        self._times: dist.Work | None = None
        """Time slots on their way beside the buckets."""
        self._sent: list[tuple[ModelBucket, _UnderWay, _Reduced]] = []
        """The buckets of the current backward pass, and what DDP waits for."""
        self._buckets: dict[int, ModelBucket] = {}
        """Buckets by number: DDP makes them once, and again after the first step."""
        self._step: _Step
        self.enter_world()

    def enter_world(self) -> None:
        """Be one of the ranks that the plan of exchanges has now."""
        self._rank, self._world_size = self.model_exchange.plan.rank, self.model_exchange.plan.world_size
        self.slots = TimeSlots(self._rank, self._world_size)
        self.average_plainly()

    def register(self, model: Any) -> None:
        """Weigh the gradients of a model, for which no other session does so.

        Raises:
            RuntimeError: when it has a hook already.
        """
        place = _places.get(model)
        if place is None:
            place = _HookPlace()
            self._install(model, place)
            _places[model] = place
        elif not (place.hook is None or place.hook.is_retired):
            raise RuntimeError("another session covers the model: end that one first, session.close()")
        place.hook = self

    def _install(self, model: Any, place: "_HookPlace") -> None:
        """Have the model reduce by the hook in this place, now and in later sessions."""
        try:
            model.register_comm_hook(None, place.reduce)
        except RuntimeError as error:
            raise RuntimeError(
                "the model has a communication hook already: do not register it, pass it to attach as base_hook"
            ) from error

    def begin(self, batch: MicroBatch, exchange: StepExchange | None, *, measures: bool, shares_times: bool) -> None:
        """Begin a step with its last batch; earlier ones are in its scale by then.

        `exchange` is `None` for DDP's own all-reduce. Where it `measures` norms, those of a local step are sketched.
        """
        assert not (shares_times and self.base_hook is not None), "base hooks carry no times"
        is_local = exchange is not None and exchange.is_local
        if exchange is not None:
            self.model_exchange.begin(exchange)
        weights, counts, nodes = self.weights, batch.plan.counts, self.model_exchange.plan.nodes
        together = weights.mine if nodes is None else sum(counts.values[rank] for rank in nodes.inside)
        weight = (weights.newest if self.reduction == "mean" else min(weights.mine, 1)) * batch.loss_divisor
        ranks = 1 if self.base_hook is None else self._world_size
        self._step = _Step(
            ranks * weight * (weights.local_factor(together) if is_local else weights.factor()),
            exchange,
            in_step=True,
            is_local=is_local,
            measures=measures and not is_local,
            shares_times=shares_times and not is_local,
            to_mean=(weight / weights.mine) ** 2 if weights.mine else 1.0,
        )
        self.sketch = None
        if measures and is_local:
            own = together / weights.mine if weights.mine else 0.0
            self.sketch = NormSketch(batch.plan.step, together / counts.total, own)
        self._sent.clear()  # of a backward pass that failed
        self._times = None

    def average_plainly(self) -> None:
        """Average over the ranks as DDP does without a hook, until a step begins: on batches of the script's own."""
        self._step = _Step(1.0 if self.base_hook is not None else 1.0 / self._world_size)

    def take_norms(self) -> SquaredNorms:
        """The squared norms of the step that ends; empty when it was not measured or no gradient was reduced."""
        step = self._step
        if not step.reduced:
            return NOT_MEASURED
        squared = self.weights.over_mean() ** 2 or 1.0  # 0: nothing counted, so all are 0
        return SquaredNorms(
            [value * step.to_mean for value in step.local.values()],
            [value / squared for value in step.reduced.values()],
        )

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook itself: called by DDP for each bucket, in order, in the thread of the backward pass."""
        began = time.perf_counter()
        buffer, number, is_last, step = bucket.buffer(), bucket.index(), bucket.is_last(), self._step
        known = self._buckets.get(number)
        if known is None or known.buffer is not buffer:
            known = self._buckets[number] = ModelBucket(number, buffer)
        if self.losses is not None:
            self.losses.gradient_begins()
        if is_last and step.in_step:
            self.clock.gradient_ready()
            self.weights.post()
        if step.measures:
            step.local[number] = squared_norm(buffer) if step.scale else 0.0
        weigh(buffer, step.scale)
        self.clock.own_s += time.perf_counter() - began
        under_way = self._send(bucket, known)
        # a future of its own for one step: on a GPU its streams wait for it, not the training thread
        reduced: _Reduced = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._sent.append((known, under_way, reduced))
        if is_last:
            self._finish()
        return reduced

    def _send(self, bucket: GradBucket, known: ModelBucket) -> _UnderWay:
        """Begin to sum a weighed bucket over ranks, and behind the last one what each rank's samples took."""
        step = self._step
        if step.is_local:
            if self.sketch is not None:
                self.sketch.add(known.buffer, bucket.index())
            by_node = self.model_exchange.plan.nodes is not None
            return self.model_exchange.send_plainly(known.buffer, inside=True) if by_node else None
        if self.base_hook is not None:
            return launched(self.base_hook, None, bucket)
        times, shares_times = None, step.shares_times and bucket.is_last()
        if step.exchange is not None:
            if known.view is None:
                known.view = view_of(bucket, known.buffer, self.model_exchange.keys)
            beside = [self.slots.write_apart(self.clock.seconds_per_sample()).tensor] if shares_times else []
            return self.model_exchange.send(known.view, beside)
        if shares_times and known.buffer.dtype in SLOT_TYPES and known.buffer.is_cpu:
            if known.carrier is None:
                known.carrier = self.slots.behind(known.buffer)
            lent, room = known.carrier
            self.slots.write(self.clock.seconds_per_sample(), room)
        else:
            lent = known.lent = known.lent or LentTensor(known.buffer)
            if shares_times:
                times = self.slots.write_apart(self.clock.seconds_per_sample(), known.buffer.device)
        # dist.all_reduce checks arguments first, 20 us a bucket; the way through torch's dispatcher costs as much again
        group: dist.ProcessGroup = self._gloo if self._gloo is not None and known.buffer.is_cpu else self.group
        under_way: dist.Work = launched(group.allreduce, [lent.alias])
        if times is not None:
            self._times = launched(group.allreduce, [times.alias])
        return under_way

    def _finish(self) -> None:
        """Wait, with the last bucket, until every bucket is reduced; measure them and hand them to DDP."""
        step = self._step
        sent, self._sent = self._sent, []
        results: list[Any] = [None if under_way is None else under_way.wait() for _, under_way, _ in sent]
        if self._times is not None:
            self._times.wait()
            self._times = None
        if step.shares_times:
            self.slots.receive()
        self.num_reduced += 1
        self.reduced_at = time.perf_counter()
        if step.in_step:
            self.clock.reduced()
        correction = self.weights.correction() if step.in_step else 1.0
        for (bucket, _, reduction), result in zip(sent, results, strict=True):
            reduced = bucket.buffer
            if self.base_hook is not None:
                reduced = result if isinstance(result, torch.Tensor) else result[0]
            if correction != 1.0:
                reduced.mul_(correction)
            if step.measures:
                step.reduced[bucket.number] = squared_norm(reduced)
            reduction.set_result(reduced)
        self.clock.own_s += time.perf_counter() - self.reduced_at


DROPPED = (
    "the gradients of this step's earlier micro-batches are gone: call optimizer.zero_grad() only where "
    "session.sync_gradients is true, after optimizer.step()"
)


MOST_ALONE = 20
"""Forward passes of training before the session's first batch, after which rank 0 warns."""


class _HookPlace:
    """The one communication hook that DDP allows a model, for one session after the other."""

    hook: GradientHook | None = None

    def __reduce__(self) -> tuple[type["_HookPlace"], tuple[()]]:
        return _HookPlace, ()  # a copied model belongs to no session: DDP does not take its hook along

    def reduce(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert self.hook is not None, "DDP registers no hook of a model that it copied"
        return self.hook.reduce(bucket)


OTHER = (
    "a second {} model is trained, which the session does not weigh: pass all models and optimizers to attach as "
    "lists, or call session.cover(model, optimizer); one that has batches of its own, equally long on all ranks, is "
    "left alone after session.ignore(model)"
)

_places: "weakref.WeakKeyDictionary[torch.nn.Module, _HookPlace]" = weakref.WeakKeyDictionary()
"""The hook of each model that was ever covered."""


class _SessionHook:
    """A hook on a user's model: keeps no session alive, and a copied or pickled one does nothing."""

    def __init__(self, owner: object | None, function: Callable[..., None]) -> None:
        """`function` is called with the owner first, as long as that lives."""
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if (alive := self._owner()) is not None:
            self._function(alive, *arguments)

    def __reduce__(self) -> tuple[type["_SessionHook"], tuple[None, Callable[..., None]]]:
        return _SessionHook, (None, self._function)


@dataclass(kw_only=True, eq=False)
class CoveredModels:
    """Weighs the gradients of the models of one session.

    Torch adds up the gradients g_j of micro-batches in `Parameter.grad`. With a mean loss they must count by their
    samples or tokens, sum_j m_j g_j, so what was added up is scaled by m_j / m_(j+1) where the next one has another
    weight. The whole is then in the scale of the last micro-batch.
    """

    make_hook: Callable[[torch.nn.Module, ModelExchange], GradientHook] | None
    """`None` where losses are scaled, or there is nothing to exchange; else `exchange` says how."""
    reduction: Reduction
    weights: StepWeights
    exchange: ExchangePlan
    weighs_alone: bool
    """Whether, in a world of one process, gradients are weighed as they come."""
    losses: LossWarnings | None
    check_commit: Callable[[], None] | None = None
    """Called before an update of plain modules, whose gradients are summed over replica groups."""

    def __post_init__(self) -> None:
        """Begin without a model."""
        self.models: list[torch.nn.Module] = []
        self._hooks: list[GradientHook] = []
        self._num_reduced = 0
        self._saw_no_sync = False
        self._num_alone = 0
        """Forward passes of training before the first batch of the session."""
        self._only_adds = False
        """Whether the current micro-batch's gradient is only added up."""
        self._probe: tuple[torch.nn.Parameter, torch.Tensor] | None = None
        """A parameter, and the gradient that it had before the last micro-batch."""
        self._batch: MicroBatch | None = None
        self._handles: list[RemovableHandle] = []
        self._ignored: list[torch.nn.Module] = []
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that update no model that is sharded and not covered."""
        self.unshared: list[DistributedDataParallel] = []
        """Models whose buffers DDP does not broadcast until `broadcast_buffers`."""

    def cover(self, model: torch.nn.Module) -> None:
        """Weigh one more model.

        Raises:
            ValueError: when hooks weigh and the model is not under DDP, or updated in its backward pass.
            RuntimeError: when it has a communication hook already, or was covered already.
        """
        if any(model is each for each in self.models):
            raise RuntimeError("the model is covered already: name each model once")
        if self.make_hook is not None:
            if not (is_weighed(model) or self.check_commit):
                raise ValueError(
                    f"{type(model).__name__} is not under DistributedDataParallel or fully_shard, but another model of "
                    "the session is: wrap it too"
                )
            if any(hasattr(each, "_in_backward_optimizers") for each in model.parameters()):
                raise ValueError(
                    "the parameters are updated inside of the backward pass (_apply_optimizer_in_backward), for which "
                    "DistributedDataParallel takes its one communication hook: call optimizer.step() after it instead"
                )
            hook = self.make_hook(model, self.exchange.of_model(model))
            hook.register(model)
            self._hooks.append(hook)
            self._handles.append(model.register_forward_pre_hook(_SessionHook(self, CoveredModels.note_forward)))
        elif self.weighs_alone:
            self._handles += [each.register_hook(self.weigh_alone) for each in model.parameters()]  # type: ignore[no-untyped-call]
        self.models.append(model)

    def refuse_others(self) -> None:
        """Refuse to train DDP models that are not covered, where hooks weigh: their gradients would be wrong."""
        if self.make_hook is None:
            return
        self._handles.append(
            register_module_module_registration_hook(_SessionHook(self, CoveredModels.watch_registered))
        )
        for found in gc.get_objects():
            if issubclass(type(found), torch.nn.Module) and (
                isinstance(found, DistributedDataParallel) or hasattr(type(found), "_get_fsdp_state")
            ):
                self._watch(found)
        self._handles.append(register_optimizer_step_pre_hook(_SessionHook(self, CoveredModels.check_optimizer)))

    def check_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse the first update of a model that was sharded since: `fully_shard` calls no hook."""
        if optimizer in self._seen:
            return
        known = {id(each) for model in (*self.models, *self._ignored) for each in model.parameters()}
        given = [each for group in optimizer.param_groups for each in group["params"]]
        if any(hasattr(each, "placements") and id(each) not in known for each in given):
            raise RuntimeError(OTHER.format("sharded"))
        self._seen.add(optimizer)

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
            raise RuntimeError(OTHER.format("sharded" if is_sharded(model) else "DistributedDataParallel"))

    def _covers(self, model: torch.nn.Module) -> bool:
        """Whether it is covered or ignored; of a sharded model every part is one by its type."""
        return any(model is part for each in (*self.models, *self._ignored) for part in each.modules())

    def broadcast_buffers(self) -> None:
        """Restore DDP's broadcasts of buffers."""
        for model in self.unshared:
            model.broadcast_buffers = True
        self.unshared.clear()

    def remove(self) -> None:
        """Train the models without the session, as plain DDP does: communication hooks cannot be removed."""
        for hook in self._hooks:
            hook.average_plainly()
            hook.is_retired = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.broadcast_buffers()
        self.exchange.close()

    def enter_world(self, rank: int, world_size: int) -> None:
        """Be one of another number of ranks, between two steps."""
        self.exchange.rank, self.exchange.world_size = rank, world_size
        for hook in self._hooks:
            hook.enter_world()

    @property
    def exchanges(self) -> list[ModelExchange]:
        """The exchanges that carry out decisions, by model."""
        return [hook.model_exchange for hook in self._hooks]

    def coded(self) -> CodedSquares:
        """Squared norms of what lossy codecs have sent and should have sent, of all models."""
        return reduce(CodedSquares.and_more, (each.coded() for each in self.exchanges), CodedSquares())

    def begin(self, batch: MicroBatch, *, measures: bool, shares_times: bool) -> None:
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
        before = self.weights.begin(batch)
        if before is not None:
            self._rescale(before, self.weights.newest)
        if batch.is_last:
            exchange = self.exchange.of_step(batch.plan.step)
            if self.losses is not None:
                self.losses.begin_step()
            for hook in self._hooks:
                hook.begin(batch, exchange, measures=measures, shares_times=shares_times)

    def _rescale(self, before: int, count: int) -> None:
        """Bring what was added up with the weight `before` into the scale of the weight `count`."""
        parameters = [each for model in self.models for each in model.parameters() if each.grad is not None]
        gradients = [each for model in self.models for each in accumulated(model)]
        if not gradients:
            raise RuntimeError(DROPPED)
        if parameters and not any(getattr(model, "gradient_as_bucket_view", False) for model in self.models):
            self._probe = parameters[0], parameters[0].grad  # type: ignore[assignment]
        if self.make_hook is None:
            return  # `scale_loss` weighs
        if before == 0:  # not times zero: a dummy batch may have made it NaN
            torch._foreach_zero_(gradients)
        elif self.reduction == "mean" and before != count:
            torch._foreach_mul_(gradients, before / count)

    def check_gradients(self) -> None:
        """Make sure, before the update, that no gradient of an earlier micro-batch was dropped.

        Raises:
            RuntimeError: when one was.
        """
        if self.check_commit is not None:
            self.check_commit()
        probe, self._probe = self._probe, None
        if probe is not None and probe[0].grad is not probe[1]:
            raise RuntimeError(DROPPED)

    def take_sketches(self, plan: StepPlan) -> StepSketches | None:
        """The sketches of the step that ended, with this plan; `None` where nothing was sketched."""
        sketches = [hook.sketch for hook in self._hooks if hook.sketch is not None]
        return StepSketches(sketches, plan.counts, self.weights.over_mean()) if sketches else None

    def loss_factor(self, batch: MicroBatch) -> float:
        """Factor on the loss of a batch before a framework that averages gradients over all ranks."""
        if not self.weights.total():
            return 0.0
        factor = self.weights.factor() * self.weights.correction()
        weight = batch.weight if self.reduction == "mean" else min(batch.weight, 1)  # a dummy's is 0
        return weight * batch.loss_divisor * self.exchange.world_size * factor

    def weigh_alone(self, gradient: torch.Tensor) -> torch.Tensor:
        """Weigh the gradient of a batch before it is added to those before it."""
        factor = 1.0 if self._batch is None else self.loss_factor(self._batch)
        return gradient if factor == 1.0 else gradient * factor

    def note_forward(self, model: torch.nn.Module, _inputs: Any) -> None:
        """Note a forward pass under the script's own `no_sync`, and the collectives before it."""
        batch = self._batch
        # a compiled model's hooks are compiled too: what they read would be compiled for each of its values
        if self.losses is not None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.losses.forward_begins(model)
        if batch is not None and batch.is_last and torch.is_grad_enabled() and not exchanges_gradient(model):
            self._saw_no_sync = True
        if batch is None and model.training and torch.is_grad_enabled():
            self._num_alone += 1
            if self._num_alone == MOST_ALONE and self.exchange.rank == 0:
                _log.warning(
                    "%d forward passes of training without a batch of the session: loop over the loader that attach "
                    "returned, or this job trains as without DYNAMIX",
                    MOST_ALONE,
                )

    @property
    def saw_backward(self) -> bool:
        """Whether a gradient came since the step began, exchanged or under `no_sync`; known where hooks weigh."""
        return self._saw_no_sync or sum(hook.num_reduced for hook in self._hooks) > self._num_reduced

    def end_step(self, *, updated: bool) -> SquaredNorms:
        """End a step; returns its squared norms over all models.

        Raises:
            RuntimeError: when the script accumulates on its own: neither exchanged nor `updated` in this step.
        """
        before, self._num_reduced = self._num_reduced, sum([hook.num_reduced for hook in self._hooks])
        saw_no_sync, self._saw_no_sync = self._saw_no_sync, False
        if saw_no_sync and not updated and self._num_reduced == before:
            raise RuntimeError(
                "the gradient of a batch under no_sync (require_backward_grad_sync=False) was neither exchanged nor "
                "applied: for gradient accumulation drop no_sync, call optimizer.step() only if "
                "session.sync_gradients, and pass to attach either micro_batch_size, where the script divides no loss, "
                "or gradient_accumulation_steps=N, where it divides each by N; local_batch_size counts the whole step "
                "(under Accelerate, dynamix.trainer.frameworks.accelerate.attach does so)"
            )
        norms = NOT_MEASURED
        for hook in self._hooks:
            if (more := hook.take_norms()) is not NOT_MEASURED:
                norms = SquaredNorms([*norms.local, *more.local], [*norms.reduced, *more.reduced])
            hook.average_plainly()
        return norms

    def take_times(self) -> list[float] | None:
        """Seconds per sample by rank, as the step's last exchange brought them."""
        newest = None
        for hook in sorted(self._hooks, key=lambda hook: hook.reduced_at):
            newest = hook.slots.take_seconds() or newest
        return newest
