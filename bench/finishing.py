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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600.0
READY = "reward     ready", "collector  ready", "arbitrator ready"
SIGNS = {
    "terminate called": re.compile(r"terminate called"),
    "signal 6": re.compile(r"Signal 6|SIGABRT|exitcode\s*: -6"),
}


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
        environ = _environment(Path(name))
        for _ in range(options.load):
            stack.enter_context(_running([sys.executable, "-c", "while True: pass"], environ, nice=options.nice))
        if options.bus:
            stack.enter_context(_bus(Path(name), environ))
        begin_s = time.monotonic()
        jobs = _run_all(options, Path(name), environ)
        seconds = round(time.monotonic() - begin_s, 1)
    for job in [job for job in jobs if not job.is_well][:3]:
        sys.stderr.write(job.output)
    told = {name: getattr(options, name) for name in ("beside", "bus", "load", "nice", "ranks", "samples")}
    figures = {**told, **summed(jobs), "seconds": seconds}
    num_bad = figures["ended_otherwise"]
    return BenchmarkReport(
        figures, _text(figures), missed=[f"{num_bad} of {len(jobs)} jobs did not end well"] if num_bad else []
    )


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


def _run_all(options: argparse.Namespace, directory: Path, environ: dict[str, str]) -> list[EndedJob]:
    command = _command(options)
    jobs: list[EndedJob] = []
    with ThreadPoolExecutor(options.beside) as pool:
        for done in as_completed([pool.submit(_run, command, directory, environ) for _ in range(options.jobs)]):
            jobs.append(done.result())
            if not jobs[-1].is_well or len(jobs) % 10 == 0:
                num_bad = sum(not job.is_well for job in jobs)
                sys.stderr.write(f"{len(jobs)}/{options.jobs} jobs, {num_bad} did not end well\n")
    return jobs


def _run(command: list[str], directory: Path, environ: dict[str, str]) -> EndedJob:
    begin_s = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environ,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        code: int | str = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = f"none within {TIMEOUT_S:g} s"
    signs = tuple(sign for sign, pattern in SIGNS.items() if pattern.search(output))
    return EndedJob(code, signs, time.monotonic() - begin_s, output)


def _command(options: argparse.Namespace) -> list[str]:
    script = ROOT / "examples" / "ddp_workload.py"
    torchrun = ["--standalone", "--nproc-per-node", str(options.ranks), str(script), "--workload", "fashion-14-mlp"]
    torchrun += ["--data", str(options.data), "--num-samples", str(options.samples)]
    if options.bus:
        return [sys.executable, "-m", "dynamix.cli.main", "train", "--", *torchrun]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun]


def _environment(directory: Path) -> dict[str, str]:
    """Ours, without what would lead to another bus; `dynamix up` and `dynamix train` meet in the directory."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYNAMIX_", "XDG_"))}
    here = {"HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    return {**kept, **here, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def _bus(directory: Path, environ: dict[str, str]) -> Iterator[None]:
    """`dynamix up` on a free port, once its services are ready."""
    log = directory / "up.log"
    with log.open("w") as file, _running([sys.executable, "-m", "dynamix.cli.main", "up"], environ, stderr=file) as up:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not all(line in log.read_text() for line in READY):
            if up.poll() is not None or time.monotonic() > deadline_s:
                raise BenchmarkError(f"dynamix up did not become ready:\n{log.read_text()}")
            time.sleep(0.1)
        yield


@contextlib.contextmanager
def _running(
    command: list[str], environ: dict[str, str], *, nice: int = 0, stderr: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["nice", "-n", str(nice), *command], env=environ, stderr=stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


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


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("finishing", __doc__)
    parser.add_argument("--jobs", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--beside", type=int, default=3, help="jobs at a time (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of each job (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2000, help="that a job trains on (default: %(default)s)")
    parser.add_argument("--data", type=Path, default=ROOT / ".data" / "fashion-mnist", help="where Fashion-MNIST is")
    parser.add_argument("--bus", action="store_true", help="with a broker, the services and `dynamix train`")
    parser.add_argument(
        "--load", type=int, default=0, metavar="N", help="busy loops beside them (default: %(default)s)"
    )
    parser.add_argument("--nice", type=int, default=0, metavar="N", help="of the busy loops (default: %(default)s)")
    return parser


def main() -> int:
    """Run, print, write; exit code 1 when a job did not end well."""
    options = _parser().parse_args()
    return run_benchmark("finishing", options, lambda: measure(options))


if __name__ == "__main__":
    sys.exit(main())
