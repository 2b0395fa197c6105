"""Watches a training script that knows nothing of it: the part of `dynamix watch` in each rank.

It changes neither gradients nor hooks of the script. Moments are taken where PyTorch passes by: DDP's forward, two
callbacks of the autograd engine around DDP's own wait at the end of a backward pass, `Work.wait`, the iterators of
DataLoader, the end of an optimizer's step. On a GPU a moment is a CUDA event. A thread beside the training adds them up
once a second and sends a `Row` over the store of torch.distributed to rank 0, and from there to the command.

torchrun starts this file by its path: nothing may import torch before the script does, which may set variables that
torch reads, and the package above imports it.
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
from typing import Any, TypeVar

import msgspec

from dynamix.schemas.watching import Row, Step

ENTERED, FORWARD, READY, DONE, UPDATED, ASKED, GOT, WAITS, WAITED = range(9)
"""Moments of a step: DDP's forward began, the model's own began, this rank's gradient is complete, the reduced one is
there, the optimizer has stepped; a batch was asked for and came; a collective operation is waited for and done."""
DATA, BETWEEN, COMPUTE, SYNC, UPDATE = range(5)
"""What the time after a moment is spent on, as the fields of `Step`."""
FOLLOWS = {ENTERED: SYNC, FORWARD: COMPUTE, READY: SYNC, DONE: UPDATE, UPDATED: BETWEEN, ASKED: DATA, WAITS: SYNC}

INTERVAL_S = 1.0
KEPT_ROWS = 30
"""Rows of a rank that the store holds at most while rank 0 does not fetch them."""
MOST_MARKS = 20_000
"""Moments of one step; what comes after them is not taken: a script that never steps must not fill the memory."""
Moment = Any
"""Seconds of the monotonic clock, or a CUDA event."""
Mark = tuple[int, Moment, int]
T = TypeVar("T", bound=Callable[..., Any])


def fold(marks: Iterable[Mark], seconds: Callable[[Moment, Moment], float]) -> Step:
    """The step that lies between the first of its moments and the last."""
    spent, num_samples = [0.0] * 5, 0
    phases = [BETWEEN]
    before: Moment = None
    for kind, moment, count in marks:
        if before is not None:
            spent[phases[-1]] += max(seconds(before, moment), 0.0)
        before, num_samples = moment, num_samples + count
        if kind in (GOT, WAITED):
            phases = phases[:-1] or [BETWEEN]
        elif kind in (ASKED, WAITS):
            phases.append(FOLLOWS[kind])
        else:
            phases = [FOLLOWS[kind]]
    return Step(*spent, num_samples=num_samples)


class Recorder:
    """Takes the moments of the training thread. That costs some 0.3 us each, and 10 us a backward pass."""

    def __init__(self) -> None:
        self.steps: deque[list[Mark]] = deque(maxlen=10_000)
        """Steps that ended and were not reported yet."""
        self.gradient_bytes = 0
        self.device, self.optimizer = "cpu", ""
        self.notes: list[str] = []
        self.on_model: Callable[[], None] = lambda: None
        """Called with each model that is found."""
        self._now: Callable[[], Moment] = time.perf_counter
        self.seconds: Callable[[Moment, Moment], float] = lambda earlier, later: later - earlier
        self._marks: list[Mark] = []
        self._thread = 0
        self._trains = self._is_reduced = self._is_awaited = False

    def note(self, text: str) -> None:
        """Keep something that the report must say."""
        if text not in self.notes:
            self.notes.append(text)

    def found(self, model: Any) -> None:
        """A model was wrapped that exchanges gradients."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        self.gradient_bytes += sum(each.numel() * each.element_size() for each in parameters)
        if parameters and parameters[0].is_cuda:
            import torch  # noqa: PLC0415 - the script has

            self.device = "cuda"

            def event() -> Any:
                made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                made.record()
                return made

            self._now, self.seconds = event, lambda earlier, later: float(earlier.elapsed_time(later)) / 1000
        self.on_model()

    def mark(self, kind: int, num_samples: int = 0) -> None:
        """This moment, if it is the training thread's."""
        if threading.get_ident() == self._thread and len(self._marks) < MOST_MARKS:
            self._marks.append((kind, self._now(), num_samples))

    def enters(self, *, trains: bool) -> None:
        """A model's forward begins; the first one says which thread trains."""
        self._trains = trains
        if trains:
            self._thread = self._thread or threading.get_ident()
            self.mark(ENTERED)

    def gradient_comes(self, queue: Callable[[Callable[[], None]], None]) -> Callable[[Any], None]:
        """A hook for the model's outputs: the first one called in a backward pass has its end noted.

        The engine calls what was queued, in that order, when the pass is over. Ours is queued before DDP's, which waits
        for the reduced gradient, and queues another behind it.
        """
        is_queued = False

        def done() -> None:
            self.mark(DONE)
            self._is_reduced = True

        def ready() -> None:
            nonlocal is_queued
            is_queued = False
            self.mark(READY)
            queue(done)

        def comes(_gradient: Any) -> None:
            nonlocal is_queued
            if not is_queued:
                is_queued = True
                queue(ready)

        return comes

    def updated(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped; the step is over if gradients were exchanged in it."""
        self.mark(UPDATED)
        if (self._is_reduced or self._is_awaited) and threading.get_ident() == self._thread:
            self.optimizer = type(optimizer).__name__
            self.steps.append(self._marks)
            self._marks, self._is_reduced, self._is_awaited = self._marks[-1:], False, False

    def fetching(self, get: T) -> T:
        """Note what a loader's iterator takes, while a model trains."""

        @functools.wraps(get)
        def fetch(*arguments: Any) -> Any:
            if not self._trains:
                return get(*arguments)
            self.mark(ASKED)
            num_samples = 0
            try:
                batch = get(*arguments)
                num_samples = size_of(batch)
            finally:
                self.mark(GOT, num_samples)
            return batch

        return fetch  # type: ignore[return-value]

    def waiting(self, wait: T, is_compiling: Callable[[], bool]) -> T:
        """Note how long a wait for a collective operation takes."""

        @functools.wraps(wait)
        def timed(*arguments: Any, **options: Any) -> Any:
            if is_compiling():
                return wait(*arguments, **options)
            self.mark(WAITS)
            try:
                return wait(*arguments, **options)
            finally:
                self.mark(WAITED)
                self._is_awaited = True

        return timed  # type: ignore[return-value]


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
    """Let PyTorch, which was just imported, tell its moments."""
    import torch  # noqa: PLC0415 - here the script's own import of it has ended
    from torch.nn.parallel import DistributedDataParallel as Model  # noqa: PLC0415
    from torch.nn.parallel import distributed  # noqa: PLC0415
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415
    from torch.utils.data import dataloader  # noqa: PLC0415

    any_model: Any = Model
    find_tensors: Any = distributed._find_tensors  # noqa: SLF001
    make, forward, prepare = any_model.__init__, any_model.forward, any_model._pre_forward  # noqa: SLF001
    comes = recorder.gradient_comes(torch.autograd.Variable._execution_engine.queue_callback)  # noqa: SLF001
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(make)
    def made(model: Any, *arguments: Any, **options: Any) -> None:
        make(model, *arguments, **options)
        recorder.found(model)

    @functools.wraps(forward)
    def ran(model: Any, *arguments: Any, **options: Any) -> Any:
        if is_compiling():
            return forward(model, *arguments, **options)
        trains = torch.is_grad_enabled()
        recorder.enters(trains=trains)
        output = forward(model, *arguments, **options)
        if trains and model.require_backward_grad_sync:
            for tensor in list(find_tensors(output))[:8]:
                if tensor.grad_fn is not None:
                    tensor.register_hook(comes)
        return output

    @functools.wraps(prepare)
    def prepared(model: Any, *arguments: Any, **options: Any) -> Any:
        result = prepare(model, *arguments, **options)
        if not is_compiling() and torch.is_grad_enabled():
            recorder.mark(FORWARD)
        return result

    any_model.__init__, any_model.forward, any_model._pre_forward = made, ran, prepared  # noqa: SLF001
    register_optimizer_step_post_hook(recorder.updated)
    iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - to wrap what `__iter__` returns would change its type
    iterator.__next__ = recorder.fetching(iterator.__next__)
    if torch.distributed.is_available():
        work: Any = torch.distributed.Work
        work.wait = recorder.waiting(work.wait, is_compiling)
        watch_sharded(recorder)


def watch_sharded(recorder: Recorder) -> None:
    """Find models of FSDP2, too; on a GPU they wait in streams of their own, which shows as computing."""
    try:
        from torch.distributed import fsdp  # noqa: PLC0415
    except ImportError:  # an older torch
        return
    shard: Any = getattr(fsdp, "fully_shard", None)
    if shard is None:
        return
    roots: set[int] = set()

    def enters(*_: Any) -> None:
        import torch  # noqa: PLC0415 - the script has

        trains = torch.is_grad_enabled()
        recorder.enters(trains=trains)
        if trains:
            recorder.mark(FORWARD)

    @functools.wraps(shard)
    def sharded(module: Any, *arguments: Any, **options: Any) -> Any:
        result = shard(module, *arguments, **options)
        parameters = list(module.parameters())
        recorder.note("FSDP: the sum of a rank's waits is known, but not the model's own communication alone")
        if parameters and parameters[0].is_cuda:
            recorder.note("FSDP on a GPU: waiting for other ranks is inside compute")
        if not roots:
            recorder.found(module)
        roots.add(id(module))
        module.register_forward_pre_hook(enters)
        return result

    fsdp.fully_shard = sharded


# --- what a rank sends


def counters() -> tuple[float, float, float, int]:
    """Wall clock, processor time, time without a processor, and throttled periods, so far."""
    queued_s = 0.0
    schedule = Path(f"/proc/self/task/{os.getpid()}/schedstat")
    if schedule.exists():
        queued_s = int(schedule.read_text().split()[1]) / 1e9
    return time.perf_counter(), time.process_time(), queued_s, throttled_periods()


def throttled_periods() -> int:
    """`nr_throttled` of this process's cgroup (version 2, or 1 with the controller cpu); 0 where there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/unified"):
            file = Path(f"{root}{path}", "cpu.stat")
            words = file.read_text().split() if file.exists() else []
            if "nr_throttled" in words:
                return int(words[words.index("nr_throttled") + 1])
    return 0


class Reporter:
    """Sends a rank's rows, from a thread of its own, which never calls a collective operation."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self._recorder, self._path = recorder, path
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        from dynamix.trainer.settings import read_environment  # noqa: PLC0415 - imports torch

        self._environment = read_environment()
        self._restart = self._environment.launch.restart_count
        self._prefix = f"dynamix/watch/{self._restart}"
        self._num_steps, self._num_sent = 0, 0
        self._before = counters()
        recorder.on_model = self.start

    def start(self) -> None:
        """Begin to report; the group exists, since a model was found."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dynamix watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Send the last row."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * INTERVAL_S)

    def _run(self) -> None:
        try:
            self._connect()
            while not self._ended.wait(INTERVAL_S):
                self._report()
            self._report()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a store that is going away, training goes on
            if not self._ended.is_set():
                sys.stderr.write(f"dynamix watch: rank {self._rank} is no longer watched: {error}\n")

    def _connect(self) -> None:
        from torch import distributed  # noqa: PLC0415 - the script has

        from dynamix.runtime.settings import node_name  # noqa: PLC0415 - as above
        from dynamix.trainer.measurement.sockets import PeerSockets  # noqa: PLC0415

        dist: Any = distributed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._node = node_name(self._environment.shared)
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public name
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        ports = []
        if isinstance(store, dist.TCPStore):
            ports.append(store.port)
            # a connection of our own: a request of ours never keeps one of the script's waiting
            store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        elif isinstance(store, dist.FileStore):
            store = dist.FileStore(store.path, self._world_size)
        self._store = store
        self._sockets = PeerSockets(ports)
        self._are_matched = self._is_listed = False
        self._fetched = [0] * self._world_size
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._out.setblocking(False)

    def _report(self) -> None:
        row = self._take_row()
        if self._rank:
            if row is not None:
                self._store.set(self._key(self._rank, self._num_sent), msgspec.msgpack.encode(row))
                self._num_sent += 1
                if self._num_sent > KEPT_ROWS:
                    self._store.delete_key(self._key(self._rank, self._num_sent - KEPT_ROWS - 1))
            return
        if row is not None:
            self._send(msgspec.msgpack.encode(row))
        for rank in range(1, self._world_size):
            while self._store.check([self._key(rank, self._fetched[rank])]):
                self._send(self._store.get(self._key(rank, self._fetched[rank])))
                self._store.delete_key(self._key(rank, self._fetched[rank]))
                self._fetched[rank] += 1

    def _key(self, rank: int, number: int | str) -> str:
        return f"{self._prefix}/{rank}/{number}"

    def _send(self, row: bytes) -> None:
        try:
            self._out.sendto(row, self._path)
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            return  # the command is busy, or gone: training goes on

    def _take_row(self) -> Row | None:
        recorder, steps = self._recorder, []
        while recorder.steps:
            marks = recorder.steps[0]
            if hasattr(marks[-1][1], "query") and not marks[-1][1].query():
                break  # the GPU is not there yet
            steps.append(fold(recorder.steps.popleft(), recorder.seconds))
        if not steps:
            return None
        if self._num_steps and not self._are_matched:
            self._match()
        if self._are_matched:
            self._sockets.read()
        now, before = counters(), self._before
        self._before, first = now, self._num_steps
        self._num_steps += len(steps)
        rate, peer = self._sockets.take_link() if self._are_matched else (None, None)
        return Row(
            restart=self._restart,
            rank=self._rank,
            world_size=self._world_size,
            node=self._node,
            device=recorder.device,
            first_step=first,
            steps=steps,
            wall_s=now[0] - before[0],
            cpu_s=now[1] - before[1],
            queued_s=now[2] - before[2],
            num_throttled=now[3] - before[3],
            memory_bytes=memory_bytes(recorder.device),
            link_bytes_per_s=rate,
            link_peer=peer,
            gradient_bytes=recorder.gradient_bytes,
            optimizer=recorder.optimizer,
            notes=recorder.notes,
        )

    def _match(self) -> None:
        """Tell the other ranks this one's connections; once all have, count those between nodes."""
        from dynamix.trainer.measurement.sockets import Connection  # noqa: PLC0415 - as above

        if not self._is_listed:
            listed = msgspec.msgpack.encode((self._node, self._sockets.candidates()))
            self._store.set(self._key(self._rank, "sockets"), listed)
            self._is_listed = True
        keys = [self._key(rank, "sockets") for rank in range(self._world_size)]
        if self._store.check(keys):
            decode = msgspec.msgpack.Decoder(tuple[str, tuple[Connection, ...]]).decode
            told = [decode(self._store.get(key)) for key in keys]
            near = [rank for rank, (node, _) in enumerate(told) if node == self._node]
            self._sockets.match([connections for _, connections in told], self._rank, near)
            self._are_matched = True


def memory_bytes(device: str) -> int:
    """Memory of this rank."""
    if device == "cuda":
        return int(sys.modules["torch"].cuda.max_memory_allocated())
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- running the script


class _AtImport:
    """Calls a function once a module was imported, by whomever."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def loaded(module: types.ModuleType) -> None:
            del loader.exec_module
            load(module)
            self._then()

        loader.exec_module = loaded
        return spec


def run_script(words: Sequence[str]) -> None:
    """Run `script arguments`, or `-m module arguments`, as Python itself would."""
    is_module = words[0] == "-m"
    script = Path(words[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if is_module else str(script.resolve().parent)
    if is_module:
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    main = types.ModuleType("__main__")
    main.__file__, vars(main)["__builtins__"] = str(script), sys.modules["builtins"]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(script))
    sys.modules["__main__"] = main  # for good: pickle and started processes look for the script's classes there
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), vars(main))  # noqa: S102 - as Python does


def launch(path: str, words: Sequence[str]) -> None:
    """Be torchrun, which starts this module in each rank, before the script; returns when all have ended."""
    from torch.distributed import run  # noqa: PLC0415 - torchrun is imported in its own process only
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
    """`launch SOCKET torchrun's words`, or in each rank `rank SOCKET script and its words`."""
    act, path, *rest = words
    if act == "launch":
        launch(path, rest)
        return
    reporters: list[Reporter] = []

    def install_all() -> None:
        recorder = Recorder()
        reporters.append(Reporter(recorder, path))
        install(recorder)

    sys.meta_path.insert(0, _AtImport("torch", install_all))
    try:
        run_script(rest)
    finally:
        for reporter in reporters:
            reporter.end()


if __name__ == "__main__":
    main(sys.argv[1:])
