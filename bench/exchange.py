"""Savings and costs of exchange codecs: `python -m bench.exchange sums|steps|coding [--links 100mbit,1gbit]`.

sums    ranks on hosts with shaped links (bench.hosts; as root) sum a gradient: by PyTorch's all-reduce of the dense
        gradient, its all-reduce of a sparse tensor, and the codecs, over the all-reduce, over owners with equal shares
        (CODEC@shares) or over ranks and gradient servers (CODEC@servers). Numbers that are not zero are steady (in the
        same places always, as in the measurement of arXiv 2402.07529), identical (on all ranks, elsewhere in every
        exchange) or independent (elsewhere on every rank, too, as in training).
steps   the same with training steps of workloads under DDP, codecs as its communication hook, without a session.
coding  CPU time of coding and decoding by codec, in one process without a network, beside the defaults of `[coding]`
        (scenarios/README.md); not as root.

An exchange or a step lasts until the slowest rank has it: median over rounds, in which all arms run once. Bytes are the
kernel's, headers and acknowledgements included. Results are compared with the all-reduce's, and over ranks bit for bit.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from bench.harness import BenchmarkError, Cell, Report, Rounds, Table, Target, Timed, Timing, parser, run
from bench.hosts import Host, Hosts, HostsError, Link, end_of
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # = dist.GradBucket, which torch's own stubs do not know
from torch.nn.parallel import DistributedDataParallel

from dynamix.collector.procfs import parse_net_dev
from dynamix.lab.simulator.scenario import Coding
from dynamix.lab.workloads import Data, Part, make_optimizer, workload_named
from dynamix.schemas.apportion import balanced_shares
from dynamix.schemas.messages.allocation import SERVERS
from dynamix.trainer.exchange.codec import BucketPart, BucketView, ExchangeCodec, Member, chunks_of, perform_alike
from dynamix.trainer.exchange.plan import CODECS, Pipeline, Sent, exchange_codec
from dynamix.trainer.exchange.servers import GradientServers
from dynamix.trainer.gradient.hook import view_of
from dynamix.trainer.job.options import SERVED_CODECS

ALL_REDUCE, TORCH_SPARSE = "all-reduce", "torch-sparse"
BASELINES = (ALL_REDUCE, TORCH_SPARSE)
KNOWN_ARMS = {
    *BASELINES,
    *CODECS,
    *(f"{name}@shares" for name in CODECS),
    *(f"{name}@{SERVERS}" for name in SERVED_CODECS),
}
LOSSLESS = (*BASELINES, "none", "rows", "sketch")
MAX_ERROR = {"sums": 1e-6, "steps": 1e-4}
"""Difference of lossless arms, which add in another order than the all-reduce, over the largest number."""
MASKS = ("steady", "identical", "independent")
NUM_GRADIENTS, STD = 3, 0.01
"""Gradients made per case, and used in turn, so that no exchange has the gradient of the one before it."""
GOALS = {
    ("rows", "independent"): 3.8,
    ("rows", "identical"): 8.0,
    ("rows", "steady"): 8.0,
    ("sketch", "identical"): 6.3,
    ("sketch", "steady"): 6.3,
}
"""Speed-ups that are asked of sums of 4 ranks behind links of 100 Mbit/s, 5 % dense."""
NUM_BUCKETS, LOCAL_BATCH_SIZE, SEED = 4, 64, 1
"""Buckets are parts of the gradient that codecs sum one behind the other, as those of DDP."""
STEPS_GOAL = 3.7
"""Speed-up that is asked of `rows` where communication dominates; the published figure is up to 3.74."""
SERVERS_VARIABLE = "BENCH_GRADIENT_SERVERS"
TIMEOUT = timedelta(seconds=300)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One network, with a gradient to sum or a workload to train."""

    num_ranks: int
    num_servers: int
    """Gradient servers, each on a host of its own behind such a link."""
    link: str
    """Rate of all links as `tc` writes it, or `none`."""
    density: float = 1.0
    """Share of a rank's numbers that are not zero."""
    mask: str = "steady"
    workload: str = ""
    """Trained, instead of a sum alone."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's work on a case."""

    arms: tuple[str, ...]
    num_rounds: int
    num_elements: int
    num_steps: int
    """Steps of an arm in a round."""


class ArmTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings of an arm on one rank; one value per round, for one exchange or step."""

    wall_s: list[float]
    cpu_s: list[float]
    tx_bytes: list[float]
    digest: int
    """Checksum of the sum, or of the parameters after the last step."""
    error: float
    """Largest difference of that from the all-reduce's, over the largest number in it."""


# --- one rank, on its host -------------------------------------------------------------------------------------------


def _codec_of(name: str, num_servers: int) -> tuple[ExchangeCodec, Member]:
    """A new codec, and this rank as it runs it; a codec keeps what it learns from exchange to exchange."""
    codec_name, _, route = name.partition("@")
    rank, equal = dist.get_rank(), (1.0,) * dist.get_world_size()
    if route == SERVERS:
        shares = balanced_shares(equal, (1.0,) * num_servers)
        return exchange_codec(codec_name), Member(rank, len(equal), shares, num_servers)
    return exchange_codec(codec_name), Member(rank, len(equal), equal if route else ())


class Summing:
    """One arm that sums gradients."""

    def __init__(self, arm: str, case: Case, plan: Plan, pipeline: Pipeline) -> None:
        self._arm, self._case, self._plan, self._pipeline = arm, case, plan, pipeline
        self._codec = None if arm in BASELINES else _codec_of(arm, case.num_servers)
        self._gradients = itertools.cycle([self._gradient(number) for number in range(NUM_GRADIENTS)])
        self.result = Tensor()

    def prepare(self) -> Callable[[], None]:
        """The next exchange; to make its gradient is not measured."""
        flat = next(self._gradients).clone()
        if self._codec is None:
            tensor = flat if self._arm == ALL_REDUCE else self._sparse(flat)
            return lambda: self._keep(dist.all_reduce(tensor), tensor)
        codec, member = self._codec

        def exchange() -> None:
            chunks = [chunk for bucket in self._buckets(flat) for chunk in chunks_of(codec, bucket, member)]
            for under_way in [self._pipeline.send(codec.reduce(chunk, member)) for chunk in chunks]:
                under_way.wait()
            self._keep(None, flat)

        return exchange

    def _keep(self, _done: object, total: Tensor) -> None:
        if not self.result.numel():  # of the first gradient
            self.result = (total.to_dense() if total.is_sparse else total).flatten().clone()

    def _gradient(self, number: int) -> Tensor:
        case, rank, num_rows = self._case, dist.get_rank(), self._plan.num_elements
        keys = dict(zip(MASKS, ([SEED], [SEED, number], [SEED, number, rank]), strict=True))
        num_touched = max(1, round(case.density * num_rows))
        rows = np.random.default_rng(keys[case.mask]).permutation(num_rows)[:num_touched]
        drawn = np.random.default_rng([SEED, number, rank, 1])
        values = drawn.standard_normal((num_touched, 1), dtype=np.float32) * np.float32(STD)
        flat = torch.zeros(num_rows, 1)
        flat[torch.from_numpy(np.sort(rows))] = torch.from_numpy(values)
        return flat.flatten()

    def _buckets(self, flat: Tensor) -> Iterator[BucketView]:
        """The gradient as buckets of about equal sizes, each with one table."""
        ends = [len(flat) * number // NUM_BUCKETS for number in range(NUM_BUCKETS + 1)]
        for number, (start, stop) in enumerate(itertools.pairwise(ends)):
            shape = torch.Size((stop - start, 1))
            yield BucketView(number, flat[start:stop], (BucketPart(f"table{number}", 0, stop - start, shape),))

    def _sparse(self, flat: Tensor) -> Tensor:
        """The gradient as autograd makes it of `nn.Embedding(sparse=True)`: indices of rows, and the rows."""
        table = flat.view(-1, 1)
        rows = (table != 0).any(1).nonzero().flatten()
        return torch.sparse_coo_tensor(rows[None], table[rows], table.shape, is_coalesced=True, check_invariants=False)


class Training:
    """One arm's model, from the same weights on the same samples as those of the others."""

    def __init__(self, arm: str, case: Case, plan: Plan, pipeline: Pipeline) -> None:
        torch.manual_seed(SEED)
        self._plan, self._workload = plan, workload_named(case.workload)
        self._model = self._workload.model()
        if arm == TORCH_SPARSE:
            for module in self._model.modules():
                if isinstance(module, nn.Embedding):
                    module.sparse = True
        self._trained = DistributedDataParallel(self._model)
        if arm not in BASELINES:
            hook = CodecHook(*_codec_of(arm, case.num_servers), self._model, pipeline)
            self._trained.register_comm_hook(hook, CodecHook.average)
        self._optimizer = make_optimizer("sgd", self._model.parameters(), 0.05)
        self._batches = self._drawn(_data(case.workload).train, case.num_ranks)

    @property
    def result(self) -> Tensor:
        """All parameters in one vector."""
        return nn.utils.parameters_to_vector(self._model.parameters()).detach()

    def prepare(self) -> Callable[[], None]:
        """Some steps on samples that are drawn before."""
        chosen = [next(self._batches) for _ in range(self._plan.num_steps)]

        def train() -> None:
            for batch in chosen:
                loss = self._workload.loss(self._trained(batch.inputs), batch.labels)
                self._optimizer.zero_grad()
                torch.autograd.backward(loss)
                self._optimizer.step()

        return train

    def _drawn(self, part: Part, num_ranks: int) -> Iterator[Part]:
        """This rank's samples of step after step: one order for all ranks, begun again when it ends."""
        generator = torch.Generator().manual_seed(SEED)
        size = LOCAL_BATCH_SIZE
        while True:
            order = torch.randperm(len(part.labels), generator=generator)
            for start in range(size * dist.get_rank(), len(order) - size * num_ranks + 1, size * num_ranks):
                mine = order[start : start + size]
                yield Part(part.inputs[mine], part.labels[mine])


@cache
def _data(workload: str) -> Data:
    return workload_named(workload).load(None)


class CodecHook:
    """A codec as DDP's communication hook, through the trainer's pipeline."""

    def __init__(self, codec: ExchangeCodec, member: Member, model: nn.Module, pipeline: Pipeline) -> None:
        self._codec, self._member, self._pipeline = codec, member, pipeline
        self._keys: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._under_way: list[Sent] = []

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Divide, then sum, which is DDP's own order; the last bucket of a step waits for all.

        The future is done from the beginning: DDP looks at it after the last bucket's hook.
        """
        flat = bucket.buffer().div_(self._member.world_size)
        view = view_of(bucket, flat, self._keys)
        chunks = chunks_of(self._codec, view, self._member)
        self._under_way += [self._pipeline.send(self._codec.reduce(chunk, self._member)) for chunk in chunks]
        if bucket.is_last():
            while self._under_way:
                self._under_way.pop(0).wait()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done


def _timed(work: Callable[[], None], num_items: int) -> Timing:
    """Time what all ranks do together, with the bytes that this one sends."""
    network = Path("/proc/self/net/dev")
    dist.barrier()
    before, _ = parse_net_dev(network.read_text())
    with Timed(num_items) as clock:
        work()
    dist.barrier()
    after, _ = parse_net_dev(network.read_text())
    return clock.timing._replace(num_bytes=after - before)


def _run_case(case: Case, plan: Plan) -> dict[str, ArmTimings]:
    """All arms, in rounds whose order is the same on all ranks."""
    addresses = [address for address in os.environ[SERVERS_VARIABLE].split(",") if address]
    pipeline = Pipeline(TIMEOUT, GradientServers(addresses, "bench-exchange", dist.get_rank(), dist.get_world_size()))
    made = Training if case.workload else Summing
    arms = {name: made(name, case, plan, pipeline) for name in plan.arms}
    num_items = plan.num_steps if case.workload else 1
    rounds = Rounds(plan.arms, plan.num_rounds, num_warm_up=2)
    for name in rounds:
        rounds.record(_timed(arms[name].prepare(), num_items))
    pipeline.close()
    expected = arms[ALL_REDUCE].result
    return {
        name: ArmTimings(
            wall_s=[timing.wall_s / num_items for timing in timings],
            cpu_s=[timing.cpu_s / num_items for timing in timings],
            tx_bytes=[timing.num_bytes / num_items for timing in timings],
            digest=zlib.crc32(arms[name].result.numpy().tobytes()),
            error=float((arms[name].result - expected).abs().max() / expected.abs().max()),
        )
        for name, timings in rounds.timings.items()
    }


def answer_cases(argument: str) -> None:
    """Be a rank: join the others, say `ready`, and answer each case on standard input with its timings."""
    plan = msgspec.json.decode(argument, type=Plan)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    print("ready", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(_run_case(msgspec.json.decode(line, type=Case), plan)).decode(), flush=True)
    dist.destroy_process_group()


# --- hosts, cases and tables -----------------------------------------------------------------------------------------


class _Process(NamedTuple):
    """A rank or a gradient server, and the log of its standard error."""

    process: subprocess.Popen[bytes]
    log: Path

    def line(self) -> bytes:
        """The next line of its output; raises BenchmarkError when it ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"it ended with code {self.process.wait()}:\n{end_of(self.log)}")
        return line


def _started(host: Host, directory: Path, command: list[str], **own: str) -> _Process:
    log = directory / f"{host.index}-{len(list(directory.iterdir()))}.log"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **own}
    with log.open("wb") as output:
        pipe = subprocess.PIPE
        return _Process(
            host.popen([sys.executable, *command], env=environ, stdin=pipe, stdout=pipe, stderr=output), log
        )


def _run_alike(
    hosts: Hosts, cases: Sequence[Case], plan: Plan, directory: Path
) -> Iterator[list[dict[str, ArmTimings]]]:
    """Run cases of as many ranks and servers behind each other by the same processes; all ranks' timings of each."""
    num_ranks, num_servers = cases[0].num_ranks, cases[0].num_servers
    with ExitStack() as stack:
        serve = ["-m", "dynamix.cli.main", "serve-gradients", "--port", "29600"]
        servers = [_started(host, directory, serve) for host in hosts[num_ranks : num_ranks + num_servers]]
        for server in servers:
            stack.callback(server.process.terminate)
            server.line()
        own = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29500",
            SERVERS_VARIABLE: ",".join(f"{host.address}:29600" for host in hosts[num_ranks : num_ranks + num_servers]),
        }
        command = ["-m", "bench.exchange", "--rank", msgspec.json.encode(plan).decode()]
        ranks = [_started(host, directory, command, RANK=str(host.index), **own) for host in hosts[:num_ranks]]
        for rank in ranks:
            stack.callback(rank.process.communicate, timeout=30)
            rank.line()
        for case in cases:
            for host in hosts:
                host.set_link(None if case.link == "none" else Link.parse(case.link))
            for rank in ranks:
                assert rank.process.stdin is not None
                rank.process.stdin.write(msgspec.json.encode(case) + b"\n")
                rank.process.stdin.flush()
            yield [msgspec.json.decode(rank.line(), type=dict[str, ArmTimings]) for rank in ranks]
        for host in hosts:
            host.set_link(None)


def measure(kind: str, cases: Sequence[Case], plan: Plan) -> Report:
    """Run all cases; raises HostsError when there can be no such hosts here."""
    rows, targets = list[list[Cell]](), list[Target]()
    with Hosts(max(case.num_ranks + case.num_servers for case in cases)) as hosts:
        for _, alike in itertools.groupby(cases, key=lambda case: (case.num_ranks, case.num_servers)):
            some = list(alike)
            with tempfile.TemporaryDirectory(prefix="dynamix-exchange-") as directory:
                for case, ranks in zip(some, _run_alike(hosts, some, plan, Path(directory)), strict=True):
                    first_s = 0.0
                    for arm in plan.arms:
                        row, median_s = _row(case, arm, [rank[arm] for rank in ranks], first_s)
                        first_s = first_s or median_s
                        rows.append(row)
                        targets += _targets(kind, case, row)
                    sys.stderr.write(f"  {case}\n")
    columns = ["ranks", "servers", "link", "density", "mask", "workload", "arm", "ms", "least", "most"]
    name = "exchange" if kind == "sums" else "exchange-steps"
    columns += ["speed-up", "MB sent", "CPU ms", "error", "ranks alike"]
    return Report([Table(name, columns, rows)], targets)


def _row(case: Case, arm: str, ranks: Sequence[ArmTimings], first_s: float) -> tuple[list[Cell], float]:
    slowest = [max(times) for times in zip(*(rank.wall_s for rank in ranks), strict=True)]
    sent = [statistics.mean(some) for some in zip(*(rank.tx_bytes for rank in ranks), strict=True)]
    spent = [sum(some) for some in zip(*(rank.cpu_s for rank in ranks), strict=True)]
    median_s = statistics.median(slowest)
    return [
        *(case.num_ranks, case.num_servers, case.link, case.density, case.mask, case.workload, arm),
        *(1e3 * median_s, 1e3 * min(slowest), 1e3 * max(slowest), (first_s or median_s) / median_s),
        *(1e-6 * statistics.median(sent), 1e3 * statistics.median(spent), max(rank.error for rank in ranks)),
        "yes" if len({rank.digest for rank in ranks}) == 1 else "NO",
    ], median_s


def _targets(kind: str, case: Case, row: Sequence[Cell]) -> Iterator[Target]:
    """Conditions that must hold in every case, and the speed-ups that are asked of some."""
    arm, speedup, error, alike = str(row[6]), row[10], row[13], row[14]
    assert isinstance(speedup, float)
    assert isinstance(error, float)
    title = f"{arm}, {case.workload or f'{case.density:g} {case.mask}'}, {case.num_ranks} ranks, {case.link}"
    if alike != "yes":
        yield Target(f"{title}: ranks alike", 0.0, at_least=1.0)
    if arm.partition("@")[0] in LOSSLESS and error > MAX_ERROR[kind]:
        yield Target(f"{title}: error", error, at_most=MAX_ERROR[kind])
    goal = GOALS.get((arm, case.mask)) if kind == "sums" else None
    if goal and (case.num_ranks, case.link, case.density) == (4, "100mbit", 0.05):
        yield Target(f"{title}: speed-up", speedup, at_least=goal)
    if case.workload in ("ncf", "lstm-zipf") and (arm, case.link) == ("rows", "100mbit"):
        yield Target(f"{title}: speed-up", speedup, at_least=STEPS_GOAL)


# --- coding ----------------------------------------------------------------------------------------------------------

SPARSE_CODECS, ROW_NUMBERS, SPARSE_DENSITY = ("rows",), 64, 0.05


def coding(num_repeats: int) -> Report:
    """Time every codec for buckets of 1 and 4 MB that are one matrix each, of 4 and of 8 ranks."""
    torch.set_num_threads(1)
    rows = [
        _coding_row(codec, side, world_size, num_repeats)
        for codec in CODECS
        for side in (512, 1024)
        for world_size in (4, 8)
    ]
    columns = ["codec", "MB", "ranks", "CPU ms per rank", "[coding] has", "s per million bytes"]
    return Report([Table("coding", columns, rows)])


def _coding_row(name: str, side: int, world_size: int, num_repeats: int) -> list[Cell]:
    columns = ROW_NUMBERS if name in SPARSE_CODECS else side
    parts = (BucketPart("weight", 0, side * side, torch.Size((side * side // columns, columns))),)
    codecs = [CODECS[name]() for _ in range(world_size)]
    shares = (1.0,) * world_size if name == "none" else ()
    members = [Member(rank, world_size, shares) for rank in range(world_size)]
    generator, times_s = torch.Generator().manual_seed(0), list[float]()
    for _ in range(4 + num_repeats):
        views = []
        for _ in members:
            gradient = torch.randn(parts[0].shape, generator=generator)
            if name in SPARSE_CODECS:
                gradient *= torch.rand(parts[0].shape[0], 1, generator=generator) < SPARSE_DENSITY
                gradient += 0.0  # no -0.0
            views.append(BucketView(0, gradient.flatten(), parts))
        legs = [codec.reduce(view, member) for codec, view, member in zip(codecs, views, members, strict=True)]
        begun, performed_s = time.process_time(), 0.0
        while asked := [each for leg in legs if (each := next(leg, None)) is not None]:
            collective = time.thread_time()
            perform_alike(asked)  # stands in for the network
            performed_s += time.thread_time() - collective
        times_s.append((time.process_time() - begun - performed_s) / world_size)
    num_bytes, measured_s = views[0].flat.nbytes, statistics.median(times_s[3:])
    assumed_s = Coding().s_per_byte(name) * num_bytes
    return [name, num_bytes / 2**20, world_size, 1e3 * measured_s, 1e3 * assumed_s, 1e6 * measured_s / num_bytes]


# --- the command line ------------------------------------------------------------------------------------------------


def _cases(options: argparse.Namespace) -> list[Case]:
    """All combinations; one rank's mask is any rank's where nothing is zero. Raises ValueError for what cannot run."""
    masks = options.masks.split(",")
    if unknown := {*masks} - {*MASKS}:
        raise ValueError(f"--masks {', '.join(unknown)}: choose from {', '.join(MASKS)}")
    work: list[dict[str, Any]] = [{"workload": workload} for workload in options.workloads.split(",")]
    if options.kind == "sums":
        densities = map(float, options.densities.split(","))
        pairs = itertools.product(densities, masks)
        work = [{"density": density, "mask": mask} for density, mask in pairs if density < 1 or mask == masks[0]]
    ranks, servers = [list(map(int, text.split(","))) for text in (options.ranks, options.servers)]
    return [
        Case(num_ranks=num_ranks, num_servers=num_servers, link=link, **one)
        for num_ranks, num_servers, link, one in itertools.product(ranks, servers, options.links.split(","), work)
    ]


def _plan(options: argparse.Namespace) -> Plan:
    arms = tuple(options.arms.split(","))
    if unknown := {*arms} - KNOWN_ARMS:
        raise ValueError(f"--arms {', '.join(unknown)}: choose from {', '.join(sorted(KNOWN_ARMS))}")
    if arms[0] != ALL_REDUCE or len({*arms}) < len(arms):
        raise ValueError(f"--arms {options.arms}: each once, and first {ALL_REDUCE}, which others are compared with")
    if any(arm.endswith(f"@{SERVERS}") for arm in arms) != all(count != "0" for count in options.servers.split(",")):
        raise ValueError("--servers: at least 1 with an arm CODEC@servers, and none without")
    return Plan(
        arms=arms,
        num_rounds=options.rounds,
        num_elements=1 << options.log2_elements,
        num_steps=options.steps,
    )


def main() -> int:
    """Run, print, write; 1 when a target is missed or a result is wrong."""
    if sys.argv[1:2] == ["--rank"]:
        answer_cases(sys.argv[2])
        return 0
    made = parser(
        *("exchange", __doc__),
        ("--ranks", "4", "numbers of ranks, each on a host; all lists with commas"),
        ("--links", "100mbit", "rates of all links, as tc writes them; none: as fast as memory"),
        ("--servers", "0", "numbers of gradient servers, for arms CODEC@servers"),
        ("--arms", "all-reduce,torch-sparse,rows,sketch,int8", "baselines and codecs"),
        ("--densities", "0.05", "of sums: shares of a rank's rows that are not zero"),
        ("--masks", ",".join(MASKS), "of sums: where rows are"),
        ("--log2-elements", 22, "of sums: logarithm of the numbers in the gradient"),
        ("--workloads", "ncf,lstm-zipf,fashion-28-cnn", "of steps"),
        ("--steps", 2, "of an arm in a round"),
        ("--rounds", 10, "measured"),
        ("--repeats", 20, "of coding: sums timed for each row"),
    )
    made.add_argument("kind", choices=("sums", "steps", "coding"))
    options = made.parse_args()
    if options.kind == "coding":
        return run("exchange", options, lambda: coding(options.repeats))
    try:
        cases, plan = _cases(options), _plan(options)
    except ValueError as error:
        made.error(str(error))
    return run("exchange", options, lambda: measure(options.kind, cases, plan), HostsError)


if __name__ == "__main__":
    sys.exit(main())
