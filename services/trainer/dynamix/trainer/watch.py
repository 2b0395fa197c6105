"""Watches a training script that knows nothing of it: the part of `dynamix watch` in each rank.

It changes no gradient and no state of the script. Moments are taken where PyTorch passes by: DDP's forward, two
callbacks of the autograd engine around DDP's own wait at the end of a backward pass, `Work.wait`, iterators of
DataLoader, the end of an optimizer's step. On a GPU a moment is a CUDA event. Once a second a thread adds them up and
sends a `Row`, over the store of torch.distributed to rank 0 and from there to the command.
"""

import atexit
import functools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore  # public, missing in the stubs of dist
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from dynamix.runtime.settings import node_name
from dynamix.schemas.watching import BETWEEN, COMPUTE, DATA, SYNC, UPDATE, Row, Step
from dynamix.trainer.measurement.sockets import Connection, PeerSockets, default_store
from dynamix.trainer.settings import read_environment

ENTERED, FORWARD, READY, DONE, UPDATED, ASKED, GOT, WAITS, WAITED = range(9)
"""DDP's forward began, the model's own began, this rank's gradient is complete, the reduced one is there, the optimizer
has stepped; a batch was asked for, and came; a collective operation is waited for, and done."""
FOLLOWS = {ENTERED: SYNC, FORWARD: COMPUTE, READY: SYNC, DONE: UPDATE, UPDATED: BETWEEN, ASKED: DATA, WAITS: SYNC}
"""Kinds of time that follow a moment."""

INTERVAL_S = 1.0
KEPT_ROWS = 30
"""Rows of a rank that the store holds at most while rank 0 does not fetch them."""
MOST_MARKS = 20_000
"""Moments of one step that are taken: a script that never steps must not fill the memory."""
FSDP_WAITS = "under FSDP on GPUs, waiting for other ranks is inside compute"
find_tensors: Callable[[Any], Iterable[torch.Tensor]] = distributed._find_tensors  # noqa: SLF001 - no public name
Moment = Any
"""Seconds of the monotonic clock, or a CUDA event."""
Mark = tuple[int, Moment, int]


def fold(marks: Iterable[Mark], seconds: Callable[[Moment, Moment], float]) -> Step:
    """The step between the first of its moments and the last."""
    spent, num_samples, phases, before = [0.0] * 5, 0, [BETWEEN], None
    for kind, moment, count in marks:
        if before is not None:
            spent[phases[-1]] += max(seconds(before, moment), 0.0)
        before, num_samples = moment, num_samples + count
        if kind in (GOT, WAITED):
            phases = phases[:-1] or [BETWEEN]
            if kind == GOT and phases == [BETWEEN]:
                phases = [COMPUTE]  # what is done with a batch is computing, as in a session
        elif kind in (ASKED, WAITS):
            phases.append(FOLLOWS[kind])
        else:
            phases = [FOLLOWS[kind]]
    data_s, between_s, compute_s, sync_s, update_s = spent
    return Step(data_s, between_s, compute_s, sync_s, update_s, num_samples)


class Recorder:
    """Takes the moments of the training thread: some 0.3 us each, and 10 us a backward pass."""

    def __init__(self) -> None:
        self.steps: deque[list[Mark]] = deque(maxlen=10_000)
        """Steps that ended and were not reported yet."""
        self.device, self.gradient_bytes = "cpu", 0
        self.notes: list[str] = []
        """Notes for the report."""
        self.on_model: Callable[[], None] = lambda: None
        """Called with each model that is found."""
        self.seconds: Callable[[Moment, Moment], float] = lambda earlier, later: later - earlier
        self._sizes: dict[int, int] = {}
        """Bytes of each parameter: FSDP shards modules within modules."""
        self._now: Callable[[], Moment] = time.perf_counter
        self._marks: list[Mark] = []
        self._thread = 0
        self._trains = self._was_reduced = self._is_queued = False

    def making(self, make: Any, *arguments: Any, **options: Any) -> Any:
        """Make a DDP model, or shard a module, or a list of them, by FSDP2."""
        made = make(*arguments, **options)
        first = arguments[0] if arguments else options["module"]
        for model in first if isinstance(first, list | tuple) else [first]:
            parameters = [each for each in model.parameters() if each.requires_grad]
            self._sizes |= {id(each): each.numel() * each.element_size() for each in parameters}
            self.gradient_bytes = sum(self._sizes.values())
            if parameters and parameters[0].is_cuda:
                self.device, self._now = "cuda", cuda_event
                self.seconds = lambda earlier, later: float(earlier.elapsed_time(later)) / 1000
            if not isinstance(model, DistributedDataParallel):
                model.register_forward_pre_hook(lambda *_: self.enters(FORWARD))
                self.notes = [FSDP_WAITS] if self.device == "cuda" else []
        self.on_model()
        return made

    def hooking(self, register: Any, model: Any, state: Any, hook: Any) -> None:
        """Register a communication hook of the script, which may wait for other ranks."""
        register(model, state, functools.wraps(hook)(functools.partial(self.waiting, hook)))

    def running(self, forward: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        """Run a DDP model forward."""
        self._is_queued = False  # even if the backward pass before was broken off
        self.enters(ENTERED)
        output = forward(model, *arguments, **options)
        if self._trains and model.require_backward_grad_sync:
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self.gradient_comes)  # type: ignore[no-untyped-call]
        return output

    def preparing(self, prepare: Any, *arguments: Any, **options: Any) -> Any:
        """DDP's work before the model's own forward; it may wait for buffers of rank 0."""
        result = prepare(*arguments, **options)
        self.enters(FORWARD)
        return result

    def enters(self, kind: int) -> None:
        """A model's forward begins; the first one tells which thread trains."""
        self._trains = torch.is_grad_enabled()
        if self._trains:
            self._thread = self._thread or threading.get_ident()
            self.mark(kind)

    def mark(self, kind: int, num_samples: int = 0) -> None:
        """This moment, if it is the training thread's, or the engine's, for which that waits."""
        if (kind in (READY, DONE) or threading.get_ident() == self._thread) and len(self._marks) < MOST_MARKS:
            self._marks.append((kind, self._now(), num_samples))

    def gradient_comes(self, _gradient: Any) -> None:
        """A hook of the model's outputs: the first that is called in a backward pass has the end of the pass noted.

        When a pass is over, the engine calls what was queued, in order. Ours is queued before DDP's, which waits for
        the reduced gradient, and queues another behind it.
        """
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - DDP's own

        def ready() -> None:
            self._is_queued = False
            self.mark(READY)
            queue(done)

        def done() -> None:
            self.mark(DONE)
            self._was_reduced = True

        if not self._is_queued:
            self._is_queued = True
            queue(ready)

    def updated(self, *_: Any) -> None:
        """An optimizer has stepped; the step is over if ranks met in it."""
        self.mark(UPDATED)
        if self._was_reduced and threading.get_ident() == self._thread:
            self.steps.append(self._marks)
            self._marks, self._was_reduced = self._marks[-1:], False

    def fetching(self, fetch: Any, iterator: Any) -> Any:
        """The next batch of a loader."""
        if not self._trains:
            return fetch(iterator)
        self.mark(ASKED)
        batch = None
        try:
            batch = fetch(iterator)
        finally:
            self.mark(GOT, size_of(batch))
        return batch

    def waiting(self, wait: Any, *arguments: Any, **options: Any) -> Any:
        """Wait for a collective operation of the script, of its hook, of SyncBatchNorm or of FSDP."""
        self.mark(WAITS)
        try:
            return wait(*arguments, **options)
        finally:
            self.mark(WAITED)
            self._was_reduced |= threading.get_ident() == self._thread


def cuda_event() -> Moment:
    """This moment in the GPU's stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def size_of(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it; 0 where there is none."""
    tensors = find_tensors(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((each.shape[0] for each in tensors if each.dim()), 0)


def install(recorder: Recorder) -> None:
    """Have PyTorch tell its moments. What is compiled around DDP tells none."""
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (DistributedDataParallel, "__init__", recorder.making),
        (DistributedDataParallel, "register_comm_hook", recorder.hooking),
        (DistributedDataParallel, "forward", recorder.running),
        (DistributedDataParallel, "_pre_forward", recorder.preparing),
        (dataloader._BaseDataLoaderIter, "__next__", recorder.fetching),  # noqa: SLF001 - scripts see the same type
        (dist.Work, "wait", recorder.waiting),
    ]
    if hasattr(fsdp, "fully_shard"):  # since torch 2.6
        wrapped.append((fsdp, "fully_shard", recorder.making))
    for owner, name, call in wrapped:
        setattr(owner, name, replacement(getattr(owner, name), call))
    register_optimizer_step_post_hook(recorder.updated)


def replacement(function: Any, call: Callable[..., Any]) -> Any:
    """Has `call` get the function and its arguments."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **options)
        return call(function, *arguments, **options)

    return called


class Reporter:
    """Sends a rank's rows, from its own thread, which calls no collective operation."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        """`path` is the command's socket."""
        self._recorder, self._path, self._environment = recorder, path, read_environment()
        self._prefix = f"dynamix/watch/{self._environment.launch.restart_count}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynamix watch", daemon=True)
        self._num_steps = self._num_sent = 0
        self._are_matched = False
        recorder.on_model = self.start

    def start(self) -> None:
        """Begin to report: a model was found, so the process group exists."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Send the last row."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(2 * INTERVAL_S)

    def _run(self) -> None:
        try:
            self._connect()
            while not self._ended.wait(INTERVAL_S):
                self._report()
            self._report()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a store that goes away, training goes on
            if not self._ended.is_set():
                sys.stderr.write(f"dynamix watch: a rank is no longer watched: {type(error).__name__}: {error}\n")

    def _connect(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._node, self._fetched = node_name(self._environment.shared), [0] * self._world_size
        store = default_store()
        self._sockets = PeerSockets([store.port] if isinstance(store, TCPStore) else [])
        if isinstance(store, TCPStore):  # a connection of our own: no request of the script waits for one of ours
            store = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        elif isinstance(store, FileStore):
            store = FileStore(store.path, self._world_size)  # type: ignore[attr-defined]
        self._store = store
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._out.settimeout(INTERVAL_S)  # ten rows fill it

    def _report(self) -> None:
        row = self._take_row()
        if row is not None:
            self._store.set(self._key(self._rank, self._num_sent), msgspec.msgpack.encode(row))
            self._num_sent += 1
            if self._num_sent > KEPT_ROWS:
                self._store.delete_key(self._key(self._rank, self._num_sent - KEPT_ROWS - 1))
        for rank in range(self._world_size if self._rank == 0 else 0):
            while self._store.check([key := self._key(rank, self._fetched[rank])]):
                with suppress(TimeoutError, FileNotFoundError, ConnectionRefusedError):  # the command is busy or gone
                    self._out.sendto(self._store.get(key), self._path)
                self._store.delete_key(key)
                self._fetched[rank] += 1

    def _key(self, rank: int, what: int | str) -> str:
        return f"{self._prefix}/{rank}/{what}"

    def _take_row(self) -> Row | None:
        recorder, steps = self._recorder, []
        while recorder.steps:
            newest = recorder.steps[0][-1][1]
            if recorder.device == "cuda" and not newest.query():
                break  # the GPU is not there yet
            steps.append(fold(recorder.steps.popleft(), recorder.seconds))
        if not steps:
            return None
        rate, peer = self._link()
        first, self._num_steps = self._num_steps, self._num_steps + len(steps)
        return Row(
            restart=self._environment.launch.restart_count,
            rank=self._rank,
            world_size=self._world_size,
            node=self._node,
            first_step=first,
            steps=steps,
            memory_bytes=memory_bytes(recorder.device),
            link_bytes_per_s=rate,
            link_peer=peer,
            gradient_bytes=recorder.gradient_bytes,
            notes=recorder.notes,
        )

    def _link(self) -> tuple[float, int] | tuple[None, None]:
        """Bytes per second to another node, and the rank there; once all ranks have listed their connections."""
        if self._are_matched:
            self._sockets.read()
            return self._sockets.take_link()
        keys = [self._key(rank, "sockets") for rank in range(self._world_size)]
        if self._num_steps and not self._store.check([keys[self._rank]]):  # the first step has opened them
            self._store.set(keys[self._rank], msgspec.msgpack.encode((self._node, self._sockets.candidates())))
        if self._store.check(keys):
            decode = msgspec.msgpack.Decoder(tuple[str, tuple[Connection, ...]]).decode
            told = [decode(self._store.get(key)) for key in keys]
            near = [rank for rank, (node, _) in enumerate(told) if node == self._node]
            self._sockets.match([connections for _, connections in told], self._rank, near)
            self._are_matched = True
        return None, None


def memory_bytes(device: str) -> int:
    """The most that was allocated on the GPU, or what the process holds."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def begin(path: str) -> None:
    """Watch this rank, whose rows go to the command's socket, until the process ends."""
    recorder = Recorder()
    reporter = Reporter(recorder, path)
    install(recorder)
    atexit.register(reporter.end)
