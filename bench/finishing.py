"""Whether jobs that have finished also end well: `python -m bench.finishing [--jobs N] [--beside N] [--bus]`.

Short jobs of examples/ddp_workload.py, several beside each other, so that a thread of a process group often waits for
a processor just as its process ends. A rank that aborts there ("terminate called without an active exception") has lost
nothing, but torchrun reports a failure and, with --max-restarts, trains the whole job again. Counted are exit codes and
signs of an abort in the output; every job must end with 0. With --bus a broker and the services run beside them.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600.0
READY = "reward     ready", "collector  ready", "arbitrator ready"
SIGNS = {"terminate called": r"terminate called", "signal 6": r"Signal 6|SIGABRT|exitcode\s*: -6"}


class EndedJob(NamedTuple):
    """One job."""

    exit_code: int | str
    """Or that it did not end."""
    signs: tuple[str, ...]
    """Signs of an abort in its output."""
    seconds: float
    output: str

    @property
    def is_well(self) -> bool:
        """Whether it ended as a finished job does."""
        return self.exit_code == 0 and not self.signs


def measure(options: argparse.Namespace) -> BenchmarkReport:
    """Run all jobs; one that did not end well is missed."""
    with tempfile.TemporaryDirectory(prefix="dynamix-finishing-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        environ = _environment(directory)
        loop = ["nice", "-n", str(options.nice), sys.executable, "-c", "while True: pass"]
        for _ in range(options.load):
            _start(stack, loop, environ)
        if options.bus:
            _start_bus(stack, directory / "up.log", environ)
        begin_s, jobs = time.monotonic(), list[EndedJob]()
        pool = stack.enter_context(ThreadPoolExecutor(options.beside))
        for done in as_completed([pool.submit(_run, _command(options), name, environ) for _ in range(options.jobs)]):
            jobs.append(done.result())
            if not jobs[-1].is_well or len(jobs) % 10 == 0:
                num_bad = sum(not job.is_well for job in jobs)
                sys.stderr.write(f"{len(jobs)}/{options.jobs} jobs, {num_bad} did not end well\n")
        seconds = round(time.monotonic() - begin_s, 1)
    for job in [job for job in jobs if not job.is_well][:3]:
        sys.stderr.write(job.output)
    told = {name: getattr(options, name) for name in ("beside", "bus", "load", "nice", "ranks", "samples")}
    figures = {**told, **summed(jobs), "seconds": seconds}
    num_bad = figures["ended_otherwise"]
    missed = [f"{num_bad} of {len(jobs)} jobs did not end well"] if num_bad else []
    return BenchmarkReport(figures, _text(figures), missed=missed)


def summed(jobs: list[EndedJob]) -> dict[str, Any]:
    """Counts over all jobs."""
    codes = Counter(str(job.exit_code) for job in jobs)
    return {
        "jobs": len(jobs),
        "ended_otherwise": sum(not job.is_well for job in jobs),
        "exit_codes": dict(sorted(codes.items())),
        "signs": {sign: sum(sign in job.signs for job in jobs) for sign in SIGNS},
        "mean_s": round(sum(job.seconds for job in jobs) / len(jobs), 2),
    }


def _run(command: list[str], directory: str, environ: dict[str, str]) -> EndedJob:
    begin_s = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environ, cwd=directory, text=True, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            code: int | str = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = f"none within {TIMEOUT_S:g} s"
    signs = tuple(sign for sign, pattern in SIGNS.items() if re.search(pattern, output))
    return EndedJob(code, signs, time.monotonic() - begin_s, output)


def _command(options: argparse.Namespace) -> list[str]:
    launcher = ["dynamix.cli.main", "train", "--"] if options.bus else ["torch.distributed.run"]
    script = [str(ROOT / "examples" / "ddp_workload.py"), "--workload", "fashion-14-mlp"]
    sizes = ["--data", str(options.data), "--num-samples", str(options.samples)]
    return [sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", str(options.ranks), *script, *sizes]


def _environment(directory: Path) -> dict[str, str]:
    """Ours, without what would lead to another bus; `dynamix up` and `dynamix train` meet in the directory."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYNAMIX_", "XDG_"))}
    here = {"HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    return {**kept, **here, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def _start_bus(stack: contextlib.ExitStack, log: Path, environ: dict[str, str]) -> None:
    """Start `dynamix up` on a free port, and wait until its services are ready."""
    up = _start(stack, [sys.executable, "-m", "dynamix.cli.main", "up"], environ, stack.enter_context(log.open("w")))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(line in log.read_text() for line in READY):
        if up.poll() is not None or time.monotonic() > deadline_s:
            raise BenchmarkError(f"dynamix up did not become ready:\n{log.read_text()}")
        time.sleep(0.1)


def _start(
    stack: contextlib.ExitStack, command: list[str], environ: dict[str, str], stderr: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that is ended with the stack."""
    process = stack.enter_context(subprocess.Popen(command, env=environ, stderr=stderr))
    stack.callback(process.terminate)
    return process


def _text(figures: dict[str, Any]) -> str:
    where = "dynamix up and dynamix train" if figures["bus"] else "torchrun, no bus"
    load = f"{figures['load']} busy loops at nice {figures['nice']}"
    lines = [
        f"{figures['jobs']} jobs of {figures['ranks']} ranks, {figures['beside']} beside each other, {where}; {load}",
        f"{figures['seconds']:.0f} s, {figures['mean_s']} s a job",
        *(f"{count:>6}  exit code {code}" for code, count in figures["exit_codes"].items()),
        *(f"{count:>6}  in the output: {sign}" for sign, count in figures["signs"].items()),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run, print, write; exit code 1 when a job did not end well."""
    parser = benchmark_parser(
        *("finishing", __doc__),
        ("--jobs", 300, "in all"),
        ("--beside", 3, "jobs at a time"),
        ("--ranks", 2, "of each job"),
        ("--samples", 2000, "that a job trains on"),
        ("--load", 0, "busy loops beside them"),
        ("--nice", 0, "of the busy loops"),
    )
    parser.add_argument("--data", type=Path, default=ROOT / ".data" / "fashion-mnist", help="where Fashion-MNIST is")
    parser.add_argument("--bus", action="store_true", help="with a broker, the services and `dynamix train`")
    options = parser.parse_args()
    return run_benchmark("finishing", options, lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
