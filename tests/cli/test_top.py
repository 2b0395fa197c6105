"""`dynamix top`: its frames, on a real broker with the real services, and on a real pseudo-terminal."""

import asyncio
import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.support import examples
from tests.support.brokers import ConfiguredServer
from tests.support.control_plane import NODE, control_plane, one_node_job, report_of
from tests.support.examples import applied, event, reward

from dynamix.cli.commands.top.frame import frame
from dynamix.cli.fleet import Fleet
from dynamix.cli.jobs import newest_job
from dynamix.cli.services import SERVICES, Heartbeats, bus_environment
from dynamix.cli.terminal import curve, duration, number, ranges, sizes_text
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas.messages import Job, Live, MetricWindow
from dynamix.schemas.messages.allocation import Exchange

S = 10**9


def window_of(ranks: dict[int, dict[str, Any]], index: int = 0, node: str = "node-a") -> MetricWindow:
    """A window whose ranks have the given training metrics."""
    plain = examples.window(node, tuple(ranks), index)
    changed = tuple(
        msgspec.structs.replace(rank, training=examples.training(**ranks[rank.rank])) for rank in plain.ranks
    )
    return msgspec.structs.replace(plain, ranks=changed)


def view_with(num_ranks: int = 4, num_windows: int = 3) -> JobView:
    view = JobView(examples.JOB)
    view.fold(examples.job({"node-a": tuple(range(num_ranks))}))
    for index in range(num_windows):
        ranks = {
            rank: {"local_batch_size": 100 + rank, "compute_time_s": 0.01 * (1 + rank % 7), "sync_time_s": 0.02}
            for rank in range(num_ranks)
        }
        view.fold(window_of(ranks, index), timestamp_ns=index * S)
        view.fold(reward("node-a", tuple(range(num_ranks)), index))
    deltas = tuple(25 if rank else -25 for rank in range(num_ranks))
    view.fold(examples.action(2, deltas=deltas, policy="proportional", local_batch_sizes=(128,) * num_ranks))
    view.fold(applied(0, 2, num_refused={"stale": 2, "generation": 0}))
    return view


def alive(*names: str, **counters: int) -> Heartbeats:
    services = Heartbeats()
    for name in names:
        services.record(Live(service=name, instance="1", uptime_s=1.0, node="node-a", counters=counters), 0.0)
    return services


def shown(
    view: JobView | None, services: Heartbeats | None = None, width: int = 80, height: int = 24, **how: Any
) -> str:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(frame(view, services or alive(*SERVICES), console, **({"now_ns": 4 * S, "now_s": 1.0} | how)))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_a_frame_shows_the_job_its_ranks_the_decision_and_the_services() -> None:
    text = shown(view_with())
    assert text.startswith("mnist-0a1b2c3d  ● running  proportional · window 2 · 4 ranks")
    assert len(rows := [line for line in text.splitlines() if "20.0 ms  0.500" in line]) == 4
    assert rows[3].split()[:2] == ["3", "103→128"]
    for part in (
        "throughput   5,120/s      ▄▄▄",
        "global batch 406 adaptive",
        "decision     -25 +25 +25 +25  of window 2 by proportional v1",
        "adopted      of window 0, from window 2 on",
        "reward       0.500  paper-sgd:  accuracy +0.600  size -0.100",
        "warning      the trainer refused 2 decisions: 2 stale",
        "services     ● arbitrator  ● collector node-a  ● reward",
    ):
        assert part in text


def test_a_frame_shows_what_is_wrong_and_what_to_do() -> None:
    view = JobView(examples.JOB)
    view.fold(examples.job({"node-x": (0, 1), "node-y": (2, 3)}, initial_exchange=Exchange(codec="rows")))
    text = shown(view, width=120)
    assert "waiting for the first window; local batch sizes 128 128 128 128" in text
    assert "no collector on node-x: start it there" in text
    view.fold(msgspec.structs.replace(window_of({0: {}}, 3), probe_note="ebpf: the report came late"))
    assert "ebpf: the report came late" in shown(view, width=120)
    view.fold(examples.action(4, reason="word " * 100))
    lines = [line for line in shown(view, width=60, height=40).splitlines() if "word" in line]
    assert lines[0].startswith("because      word word")
    view.fold(examples.job({"node-a": (0, 1)}, phase="ended", end_reason="all epochs done"))
    assert "■ ended" in (text := shown(view, width=120))
    assert "all epochs done" in text
    services = alive("trainer", "collector", "reward")
    text = shown(None, services, missing="no job 'x'; jobs: a", now_s=10)
    assert text.startswith("no job 'x'\njobs: a\n")
    assert "arbitrator: no heartbeat" in text
    assert text.rstrip().endswith("services     ○ collector node-a  ○ reward"), "a trainer may have ended"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0.0000421), "42 µs"),
        (duration(600), "10 min"),
        (number(0.51234), "0.512"),
        (curve([1, 2, 3, 4, 5, 6, 7, 8], 3), "▁▄▇"),
        (curve([0.0, 1e-308], 2), "▁█"),
        (ranges([0, 4, 5, 6, 9, 10]), "0, 4-6, 9-10"),
        (sizes_text((1, 2, 3)), "1/2/3"),
        (sizes_text(range(9)), "0...8 (4)"),
    ],
)
def test_numbers_are_written_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


# --- on a broker


def job_called(name: str, phase: str = "running") -> Job:
    return msgspec.structs.replace(examples.job(), job=name, phase=phase)


async def run_top(settings: Any, *arguments: str) -> tuple[int | None, str, str]:
    environ = {**os.environ, **bus_environment(settings), "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "dynamix.cli.main", "top", *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_a_job_that_real_services_steer_is_shown_and_written_as_json() -> None:
    async with control_plane(*SERVICES) as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        for window in range(3):
            speeds = (1000.0, 1000.0, 1000.0, 300.0)
            await plane.bus.publish(report_of(job, window, job.initial_local_batch_sizes, speeds))
        await plane.wait_for_actions(3)
        await plane.bus.publish(applied(0, 2))
        await plane.bus.publish(event(2))
        (_, text, _), (_, written, _) = await asyncio.gather(
            run_top(plane.server.settings, "--once"), run_top(plane.server.settings, "--json", "-")
        )
    assert "window 2 · 4 ranks" in text
    assert "size-stuck" in text
    assert f"● collector {NODE}" in text
    data = json.loads(written)
    assert (data["job"]["name"], data["services_missing"]) == (job.job, [])
    assert [rank["training"]["local_batch_size"] for rank in data["job"]["ranks"]] == [128] * 4
    assert [rank["reward"] is not None for rank in data["job"]["ranks"]] == [True] * 4
    assert data["job"]["action"]["local_batch_sizes"][3] < 128
    assert "carry" not in data["job"]["action"]
    assert (len(data["windows"]), data["job"]["events"][0]["signature"]) == (3, "size-stuck")


@pytest.mark.parametrize("wanted", [None, "second"])
async def test_it_turns_to_a_job_that_starts_and_not_to_one_that_ends(bus: Bus, wanted: str | None) -> None:
    fleet = Fleet(bus, wanted)

    async def turns_to(name: str) -> None:
        async with asyncio.timeout(60):
            while fleet.newest(0) != name:
                await fleet.news.wait()

    async with fleet.following():
        await bus.publish(job_called("first-00000001"))
        if wanted is None:
            await turns_to("first-00000001")
        await bus.publish(job_called("second-00000002"))
        await turns_to("second-00000002")
        await bus.publish(job_called("first-00000001", "ended"))
        await bus.publish(examples.window(job="second-00000002"))
        async with asyncio.timeout(60):
            while (view := await fleet.open("second-00000002")) is None or view.window != 0:
                await fleet.news.wait()
        await turns_to("second-00000002")


async def test_what_cannot_be_shown_is_a_sentence_and_1(server: ConfiguredServer, bus: Bus) -> None:
    for job in (job_called("first-00000001", "ended"), job_called("second-00000002")):
        await bus.publish(job)
    code, output, errors = await run_top(server.settings, "nosuch", "--once")
    assert (code, output) == (1, "")
    assert "no job is called 'nosuch'; jobs on this broker: second-00000002, first-00000001" in errors
    async with EmbeddedServer() as without_streams:
        code, _, errors = await run_top(without_streams.settings, "--once")
    assert (code, "run `dynamix provision`" in errors, "Traceback" in errors) == (1, True, False)


@pytest.mark.parametrize(
    ("wanted", "silent", "expected"),
    [
        (None, (), "b-00000002"),
        (None, ("b-00000002",), "a-00000004"),
        ("a-00000001", (), "a-00000001"),
        ("a", (), "a-00000004"),
        ("b", ("b-00000002",), "b-00000002"),
        ("00000003", (), "c-00000003"),
        ("a-0000", (), "a-00000004"),
        ("missing", (), None),
    ],
)
def test_the_job_shown_is_the_one_meant(wanted: str | None, silent: tuple[str, ...], expected: str | None) -> None:
    phases = {"a-00000001": "ended", "b-00000002": "running", "c-00000003": "ended", "a-00000004": "ended"}
    jobs = {name: job_called(name, phase) for name, phase in phases.items()}
    assert newest_job(jobs, wanted, silent) == expected


# --- on a terminal


class Terminal:
    """The master side of a pseudo-terminal."""

    def __init__(self, width: int, height: int) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.shown = b""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        self.shown += os.read(self._master, 1 << 16)
        self._news.set()

    async def shows(self, text: bytes) -> None:
        """Wait until something was written."""
        async with asyncio.timeout(60):
            while text not in self.shown:
                self._news.clear()
                await self._news.wait()

    def types(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        os.close(self.slave)


@pytest.mark.parametrize("leave", ["q", "SIGINT"])
async def test_it_draws_until_one_leaves_and_gives_the_terminal_back(
    server: ConfiguredServer, bus: Bus, leave: str
) -> None:
    for message in (examples.job(), examples.window(), examples.action()):
        await bus.publish(message)
    terminal = Terminal(80, 24)
    environ = {**os.environ, **bus_environment(server.settings), "TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "dynamix.cli.main", "top"],
        env={key: value for key, value in environ.items() if key not in ("COLUMNS", "LINES")},
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
    )
    try:
        await terminal.shows(b"mnist-0a1b2c3d")
        await terminal.shows(b"no change")
        if leave == "SIGINT":
            process.send_signal(signal.SIGINT)
        else:
            terminal.types(leave.encode())
        async with asyncio.timeout(60):
            code = await process.wait()
        await terminal.shows(b"\x1b[?1049l")
        assert code == (130 if leave == "SIGINT" else 0)
        assert terminal.shown.index(b"\x1b[?1049h") < terminal.shown.index(b"mnist-0a1b2c3d")
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert b"Traceback" not in terminal.shown
    finally:
        terminal.close()
