"""Runs the demo: broker, services, then one training job per variant, with progress as it goes."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamix.cli.services import SERVICES, ServiceProcess, bus_environment, wait_until_ready
from dynamix.cli.source import capture_stored
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import DIE_WITH_PARENT, EmbeddedServer
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_any
from dynamix.schemas.streams import FEED

from .plan import DemoPlan, DemoRun, DemoStep, Variant, read_progress, summarise

LAST_MESSAGES_TIMEOUT_S = 5.0
MAX_ERROR_CHARACTERS = 3000
MOST_WINDOWS = 1 << 20
TORCH_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart of the ranks fails under gloo
}

Watcher = Callable[[str, JobView, float | None], None]
"""Called with the policy, the job so far, and at its end its last accuracy."""


class TrainingFailedError(RuntimeError):
    """The training job ended with an error; the text holds what its first failing rank said."""


Page = Callable[[Bus], contextlib.AbstractAsyncContextManager[None]]
"""Shows what happens on the bus for as long as its context lasts."""


async def run_demo(
    plan: DemoPlan,
    variants: Sequence[Variant],
    announce: Callable[[str], None],
    watch: Watcher,
    *,
    page: Page | None = None,
    captures: Path | None = None,
) -> list[DemoRun]:
    """Carry out the plan once per variant, one after the other, against the same services.

    `captures` is a directory for a capture of each run, named by its policy.

    Raises TrainingFailedError, TimeoutError when a service does not become ready, or CancelledError after SIGTERM, when
    nothing that it started is left.
    """
    with _cancelled_by_sigterm(), tempfile.TemporaryDirectory(prefix="dynamix-demo-") as directory:
        async with services(Path(directory), announce) as (bus, environ):
            demo = _Demo(plan, bus, environ, Path(directory), watch, captures)
            async with page(bus) if page is not None else contextlib.nullcontext():
                return [await demo.run(variant) for variant in variants]


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """End the running task where the signal would end the process at once, with its jobs and files left behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a task"
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.asynccontextmanager
async def services(directory: Path, announce: Callable[[str], None]) -> AsyncIterator[tuple[Bus, dict[str, str]]]:
    """An embedded broker with its streams and every service in a process of its own, ready."""
    async with EmbeddedServer() as server:
        bus = await Bus.connect(server.settings, name="demo")
        children: list[ServiceProcess] = []
        environ = {**bus_environment(server.settings), "DYNAMIX_NODE": "demo-node"}
        try:
            await provision(bus)
            with (directory / "services.log").open("wb") as log:
                children = [ServiceProcess(name, environ, log) for name in SERVICES]
                for child in children:
                    child.start()
            await wait_until_ready(bus, SERVICES)
            named = ", ".join(f"{child.name} (pid {child.pid})" for child in children)
            announce(f"nats-server (pid {server.pid}) and {named} are ready")
            yield bus, environ
        finally:
            for child in children:
                child.stop()
            await bus.close()


class _Demo(NamedTuple):
    """Runs of one plan against one set of services."""

    plan: DemoPlan
    bus: Bus
    environ: dict[str, str]
    directory: Path
    watch: Watcher
    captures: Path | None = None

    async def run(self, variant: Variant) -> DemoRun:
        """One training job, watched on the bus."""
        job = f"demo-{variant.policy}-{subjects.new_run_id()}"
        view, more = JobView(job, most_windows=MOST_WINDOWS), asyncio.Event()
        follower = asyncio.create_task(self._follow(variant.policy, view, more))
        try:
            progress = await self._train(job, variant)
            with contextlib.suppress(TimeoutError):  # the job has drained: what is missing is on its way
                async with asyncio.timeout(LAST_MESSAGES_TIMEOUT_S):
                    while len(view.history) < len(progress) // self.plan.window_steps:
                        more.clear()
                        await more.wait()
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
        if self.captures is not None:
            self.captures.mkdir(parents=True, exist_ok=True)
            await capture_stored(self.bus, job, self.captures / f"{variant.policy}.dxc")
        run = summarise(self.plan, variant.policy, progress, view)
        self.watch(variant.policy, view, run.summary.final_accuracy)
        return run

    async def _follow(self, policy: str, view: JobView, more: asyncio.Event) -> None:
        """Fold the job's messages as they come."""
        wanted = [subjects.of("window", view.name, subjects.ANY), subjects.of("applied", view.name)]
        async with self.bus.consume(FEED.name, wanted, start="all") as consumer:
            async for batch in consumer:
                for message in batch:
                    view.fold(decode_any(message.subject, message.payload), message.timestamp_ns)
                self.watch(policy, view, None)
                more.set()

    async def _train(self, job: str, variant: Variant) -> list[DemoStep]:
        """Run the training script under torchrun until it ends; its own log. Raises TrainingFailedError."""
        progress_log, output = self.directory / f"{job}.jsonl", self.directory / f"{job}.log"
        argument = msgspec.json.encode((self.plan, variant.arguments, str(progress_log), os.getpid())).decode()
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        command = [*guard, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.plan.num_ranks}", "-m", "dynamix.cli.commands.demo.job", argument]
        with output.open("wb") as log:
            own = {"DYNAMIX_JOB": job, "DYNAMIX_TRAINER_POLICY": variant.policy}
            environ = {**os.environ, **TORCH_ENVIRONMENT, **self.environ, **own}
            process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=log, stderr=log)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.terminate()
                await process.wait()
                raise
        if code != 0:
            said = _first_error(output)
            raise TrainingFailedError(f"the training job ({variant.policy}) ended with code {code}:\n{said}")
        return read_progress(progress_log.read_bytes())


def _first_error(output: Path) -> str:
    """What the first failing rank said; torchrun's own report of the others comes after it."""
    text = output.read_text(errors="replace")
    start = max(0, text.find("Traceback"))
    return text[start : start + MAX_ERROR_CHARACTERS]
