"""Watches a training script that knows nothing of it: the part of `dynamix watch` in each rank.

It changes neither gradients nor hooks of the script. Moments are taken where PyTorch passes by: DDP's forward, two
callbacks of the autograd engine around DDP's own wait at the end of a backward pass, `Work.wait`, iterators of
DataLoader, the end of an optimizer's step. On a GPU a moment is a CUDA event. Once a second a thread adds them up and
sends a `Row`, over the store of torch.distributed to rank 0 and from there to the command.

torchrun starts this file by its path. Nothing may import torch before the script does, which may set variables that
torch reads; so what needs torch, or the package above, is imported in functions.
"""

import functools
import importlib.machinery
import importlib.util
import os
import runpy
import socket
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.schemas.watching import Row, Step

ENTERED, FORWARD, READY, DONE, UPDATED, ASKED, GOT, WAITS, WAITED = range(9)
"""DDP's forward began, the model's own began, this rank's gradient is complete, the reduced one is there, the optimizer
has stepped; a batch was asked for, and came; a collective operation is waited for, and done."""
DATA, BETWEEN, COMPUTE, SYNC, UPDATE = range(5)
"""Fields of `Step`: what the time after a moment is spent on."""
FOLLOWS = {ENTERED: SYNC, FORWARD: COMPUTE, READY: SYNC, DONE: UPDATE, UPDATED: BETWEEN, ASKED: DATA, WAITS: SYNC}

INTERVAL_S = 1.0
KEPT_ROWS = 30
"""Rows of a rank that the store holds at most while rank 0 does not fetch them."""
MOST_MARKS = 20_000
"""Moments of one step that are taken: a script that never steps must not fill the memory."""
MOST_OUTPUTS = 8
"""Tensors of a model's output of which one must have a gradient."""
FSDP_WAITS = "under FSDP on GPUs, waiting for other ranks is inside compute"
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
        self.device, self.optimizer, self.gradient_bytes = "cpu", "", 0
        self.notes: list[str] = []
        """What the report must say."""
        self.on_model: Callable[[], None] = lambda: None
        """Called with each model that is found."""
        self.seconds: Callable[[Moment, Moment], float] = lambda earlier, later: later - earlier
        self.is_training: Callable[[], bool]
        self.find_tensors: Callable[[Any], Iterable[Any]]
        self.gradient_hook: Callable[[Any], None]
        self._now: Callable[[], Moment] = time.perf_counter
        self._marks: list[Mark] = []
        self._thread = 0
        self._trains = self._was_reduced = self._is_queued = False

    def found(self, model: Any) -> None:
        """A model was wrapped that exchanges gradients."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        self.gradient_bytes += sum(each.numel() * each.element_size() for each in parameters)
        if parameters and parameters[0].is_cuda:
            self.device, self._now = "cuda", cuda_event
            self.seconds = lambda earlier, later: float(earlier.elapsed_time(later)) / 1000
        self.on_model()

    def making(self, make: Any, model: Any, *arguments: Any, **options: Any) -> None:
        """Make a DDP model."""
        make(model, *arguments, **options)
        self.found(model)

    def sharding(self, shard: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        """Shard a module by FSDP2."""
        sharded = shard(module, *arguments, **options)
        module.register_forward_pre_hook(lambda *_: self.enters(FORWARD))
        self.found(module)
        if self.device == "cuda" and FSDP_WAITS not in self.notes:
            self.notes.append(FSDP_WAITS)
        return sharded

    def running(self, forward: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        """Run a DDP model forward."""
        self.enters(ENTERED)
        output = forward(model, *arguments, **options)
        if self._trains and model.require_backward_grad_sync:
            for tensor in list(self.find_tensors(output))[:MOST_OUTPUTS]:
                if tensor.grad_fn is not None:
                    tensor.register_hook(self.gradient_hook)
        return output

    def preparing(self, prepare: Any, *arguments: Any, **options: Any) -> Any:
        """What DDP does before the model's own forward; it may wait for buffers of rank 0."""
        result = prepare(*arguments, **options)
        self.enters(FORWARD)
        return result

    def enters(self, kind: int) -> None:
        """A model's forward begins; the first one tells which thread trains."""
        self._trains = self.is_training()
        if self._trains:
            self._thread = self._thread or threading.get_ident()
            self.mark(kind)

    def mark(self, kind: int, num_samples: int = 0) -> None:
        """This moment, if it is the training thread's."""
        if threading.get_ident() == self._thread and len(self._marks) < MOST_MARKS:
            self._marks.append((kind, self._now(), num_samples))

    def gradient_comes(self, queue: Callable[[Callable[[], None]], None], _gradient: Any) -> None:
        """A hook of the model's outputs: the first that is called in a backward pass has the end of the pass noted.

        When a pass is over, the engine calls what was queued, in order. Ours is queued before DDP's, which waits for
        the reduced gradient, and queues another behind it.
        """

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

    def updated(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped; the step is over if ranks met in it."""
        self.mark(UPDATED)
        if self._was_reduced and threading.get_ident() == self._thread:
            self.optimizer = type(optimizer).__name__
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
        """Wait for a collective operation of the script, of SyncBatchNorm or of FSDP."""
        self.mark(WAITS)
        try:
            return wait(*arguments, **options)
        finally:
            self.mark(WAITED)
            self._was_reduced |= threading.get_ident() == self._thread


def cuda_event() -> Moment:
    """This moment in the GPU's stream."""
    event = sys.modules["torch"].cuda.Event(enable_timing=True)
    event.record()
    return event


def size_of(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it; 0 where there is none."""
    for _ in range(3):
        if hasattr(batch, "shape"):
            return int(batch.shape[0]) if len(batch.shape) else 0
        values = list(batch.values()) if hasattr(batch, "values") else batch
        if not isinstance(values, list | tuple) or not values:
            return 0
        batch = values[0]
    return 0


def install(recorder: Recorder) -> None:
    """Have PyTorch, which was just imported, tell its moments. What is compiled around DDP tells none."""
    import torch  # noqa: PLC0415 - the script's own import of it has ended
    from torch.nn.parallel import distributed  # noqa: PLC0415
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415
    from torch.utils.data import dataloader  # noqa: PLC0415

    model: Any = distributed.DistributedDataParallel
    loaders: Any = dataloader
    recorder.is_training = torch.is_grad_enabled
    recorder.find_tensors = distributed._find_tensors  # type: ignore[attr-defined] # noqa: SLF001
    queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
    recorder.gradient_hook = functools.partial(recorder.gradient_comes, queue)
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (model, "__init__", recorder.making),
        (model, "forward", recorder.running),
        (model, "_pre_forward", recorder.preparing),
        (loaders._BaseDataLoaderIter, "__next__", recorder.fetching),  # noqa: SLF001 - scripts see the same type
    ]
    if torch.distributed.is_available():
        from torch.distributed import fsdp  # noqa: PLC0415

        wrapped.append((torch.distributed.Work, "wait", recorder.waiting))
        if hasattr(fsdp, "fully_shard"):  # since torch 2.6
            wrapped.append((fsdp, "fully_shard", recorder.sharding))
    for owner, name, call in wrapped:
        setattr(owner, name, replacement(getattr(owner, name), call, torch.compiler.is_compiling))
    register_optimizer_step_post_hook(recorder.updated)


def replacement(function: Any, call: Callable[..., Any], is_compiling: Callable[[], bool]) -> Any:
    """Has `call` get the function and its arguments."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) if is_compiling() else call(function, *arguments, **options)

    return called


class Reporter:
    """Sends a rank's rows, from a thread of its own, which calls no collective operation."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        """`path` is the command's socket."""
        from dynamix.trainer.settings import read_environment  # noqa: PLC0415 - imports torch

        self._recorder, self._path, self._environment = recorder, path, read_environment()
        self._prefix = f"dynamix/watch/{self._environment.launch.restart_count}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynamix watch", daemon=True)
        self._num_steps = self._num_sent = 0
        self._before = counters()
        self._are_matched = self._is_listed = False
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
        from torch import distributed  # noqa: PLC0415 - the script has

        from dynamix.runtime.settings import node_name  # noqa: PLC0415 - as above
        from dynamix.trainer.measurement.sockets import PeerSockets  # noqa: PLC0415

        dist: Any = distributed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._node, self._fetched = node_name(self._environment.shared), [0] * self._world_size
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public name
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        is_tcp = isinstance(store, dist.TCPStore)
        self._sockets = PeerSockets([store.port] if is_tcp else [])
        if is_tcp:  # a connection of our own: no request of the script waits for one of ours
            store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        elif isinstance(store, dist.FileStore):
            store = dist.FileStore(store.path, self._world_size)
        self._store = store
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._out.settimeout(INTERVAL_S)  # ten rows fill it

    def _report(self) -> None:
        row = self._take_row()
        if row is not None and self._rank:
            self._store.set(self._key(self._rank, self._num_sent), msgspec.msgpack.encode(row))
            self._num_sent += 1
            if self._num_sent > KEPT_ROWS:
                self._store.delete_key(self._key(self._rank, self._num_sent - KEPT_ROWS - 1))
        if self._rank:
            return
        if row is not None:
            self._send(msgspec.msgpack.encode(row))
        for rank in range(1, self._world_size):
            while self._store.check([key := self._key(rank, self._fetched[rank])]):
                self._send(self._store.get(key))
                self._store.delete_key(key)
                self._fetched[rank] += 1

    def _key(self, rank: int, what: int | str) -> str:
        return f"{self._prefix}/{rank}/{what}"

    def _send(self, row: bytes) -> None:
        try:
            self._out.sendto(row, self._path)
        except (TimeoutError, FileNotFoundError, ConnectionRefusedError):
            return  # the command is busy or gone: training goes on

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
        now, before, first = counters(), self._before, self._num_steps
        self._before, self._num_steps = now, first + len(steps)
        return Row(
            restart=self._environment.launch.restart_count,
            rank=self._rank,
            world_size=self._world_size,
            node=self._node,
            device=recorder.device,
            first_step=first,
            steps=steps,
            cpu_s=now[0] - before[0],
            queued_s=now[1] - before[1],
            memory_bytes=memory_bytes(recorder.device),
            link_bytes_per_s=rate,
            link_peer=peer,
            gradient_bytes=recorder.gradient_bytes,
            optimizer=recorder.optimizer,
            notes=recorder.notes,
        )

    def _link(self) -> tuple[float, int] | tuple[None, None]:
        """Bytes per second to another node, and the rank there; once all ranks have listed their connections."""
        from dynamix.trainer.measurement.sockets import Connection  # noqa: PLC0415 - as above

        if self._are_matched:
            self._sockets.read()
            return self._sockets.take_link()
        if self._num_steps and not self._is_listed:  # the first step has opened them
            listed = msgspec.msgpack.encode((self._node, self._sockets.candidates()))
            self._store.set(self._key(self._rank, "sockets"), listed)
            self._is_listed = True
        keys = [self._key(rank, "sockets") for rank in range(self._world_size)]
        if self._is_listed and self._store.check(keys):
            decode = msgspec.msgpack.Decoder(tuple[str, tuple[Connection, ...]]).decode
            told = [decode(self._store.get(key)) for key in keys]
            near = [rank for rank, (node, _) in enumerate(told) if node == self._node]
            self._sockets.match([connections for _, connections in told], self._rank, near)
            self._are_matched = True
        return None, None


def counters() -> tuple[float, float]:
    """Processor time of all threads, and the main thread's time without a processor, so far."""
    schedule = Path(f"/proc/self/task/{os.getpid()}/schedstat")
    return time.process_time(), int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0


def memory_bytes(device: str) -> int:
    """The most that was allocated on the GPU, or what the process holds."""
    if device == "cuda":
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- starting


class _AtImport:
    """Calls a function once a module was imported, by whomever."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        load = getattr(loader, "exec_module", None)

        def loaded(module: types.ModuleType) -> None:
            del loader.exec_module
            load(module)  # type: ignore[misc]
            self._then()

        if load is not None:
            loader.exec_module = loaded
        return spec


def run_script(words: Sequence[str]) -> None:
    """Run `script arguments`, or `-m module arguments`, as Python itself would."""
    is_module, script = words[0] == "-m", Path(words[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if is_module else str(script.resolve().parent)
    sys.argv = list(words[is_module:])
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__file__, vars(main)["__builtins__"] = str(script), sys.modules["builtins"]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(script))
    sys.modules["__main__"] = main  # for good: pickle and started processes look for the script's classes there
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), vars(main))  # noqa: S102 - as Python does


def launch(path: str, words: Sequence[str]) -> None:
    """Be torchrun, which starts this file in each rank, and that the script."""
    from torch.distributed import run  # noqa: PLC0415 - in torchrun's own process
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

    sys.argv[0] = "torchrun"  # its name in messages
    options = run.parse_args(list(words))  # type: ignore[no-untyped-call]
    if options.no_python:
        raise SystemExit("dynamix watch: --no-python starts another program than Python, which cannot be watched")
    script = [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]
    options.module = options.run_path = False
    options.training_script, options.training_script_args = __file__, ["rank", path, *script]
    record(run.run)(options)


def main(words: Sequence[str]) -> None:
    """`launch SOCKET` and torchrun's words; or, in each rank, `rank SOCKET`, the script and its words."""
    act, path, *rest = words
    if act == "launch":
        launch(path, rest)
        return
    reporters: list[Reporter] = []

    def begin() -> None:
        recorder = Recorder()
        reporters.append(Reporter(recorder, path))
        install(recorder)

    sys.meta_path.insert(0, _AtImport("torch", begin))
    try:
        run_script(rest)
    finally:
        for reporter in reporters:
            reporter.end()


if __name__ == "__main__":
    main(sys.argv[1:])
