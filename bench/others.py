"""Other people's programs as arms of `bench.cluster`, on the same hosts, data, seeds and clock (`make others`).

Each function is a training script as the documentation of its package shows it, without a session; a line that a user
of plain DDP has to add or change ends with `# +`, and the table counts them. What else a function does (a port, a store
that torchrun would have) is the bench's. The packages are pinned in `others.txt`; nothing of them is copied.

All count steps like the other arms, every rank the same number, but hivemind's. At a look the ranks' parameters are
averaged where they differ, as for our own local steps. A program that fails has missed the target.
"""
# ruff: noqa: PLC0415 - each program imports its own package, which others do not need

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from bench.hosts import NETWORK
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

if TYPE_CHECKING:
    from bench.cluster import Rank

LIGHTHOUSE_PORT = 29400
LIGHTHOUSE = f"""import sys; from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=4); sys.stdin.read()"""
"""torchft's coordinator, at the switch like our broker; a deployment starts `torchft_lighthouse`."""


def _batches(rank: "Rank") -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of epoch after epoch, as the plain script has them."""
    sampler: DistributedSampler[Any] = DistributedSampler(rank.dataset, seed=rank.place.wanted.seed)
    loader = DataLoader(rank.dataset, batch_size=rank.local_batch_size, sampler=sampler)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        yield from loader


# --- torchft: each host is a replica group of one process ------------------------------------------------------------


def _torchft(rank: "Rank", context: Callable[[Any, Any, torch.optim.Optimizer], Any]) -> None:
    from torchft import Manager, ProcessGroupGloo  # +

    rank.is_local = True
    model, optimizer = rank.made_model(rank.learning_rate, lambda module: module)
    address = str(NETWORK[2 + rank.place.rank])
    # torchrun has one
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(  # +
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),  # +
        min_replica_size=rank.place.world_size,  # +
        use_async_quorum=False,  # +
        load_state_dict=model.load_state_dict,  # +
        state_dict=model.state_dict,  # +
        replica_id=f"replica_{rank.place.rank}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{NETWORK[1]}:{LIGHTHOUSE_PORT}",
        hostname=address,
        init_sync=False,  # all begin from the same seed
        connect_timeout=timedelta(seconds=30),
    )
    rank.begin()
    with context(manager, model, optimizer):  # +
        for inputs, targets in _batches(rank):
            rank.train_step(model, optimizer, inputs, targets)
            if rank.after_step(model):
                break
    manager.shutdown(wait=False)


def torchft_local(rank: "Rank", sync_every: int) -> None:
    """Parameters are averaged after every `sync_every` steps."""
    from torchft.local_sgd import LocalSGD  # +

    _torchft(rank, lambda manager, model, optimizer: LocalSGD(manager, model, optimizer, sync_every=sync_every))


def torchft_diloco(rank: "Rank", sync_every: int) -> None:
    """An outer Nesterov step after every `sync_every` steps, with the published rate and momentum."""
    from torchft.local_sgd import DiLoCo  # +

    def context(manager: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)  # +
        return DiLoCo(manager, [model], optimizer, outer, sync_every=sync_every)

    _torchft(rank, context)


# --- Accelerate and torch --------------------------------------------------------------------------------------------


def accelerate_local(rank: "Rank", local_sgd_steps: int) -> None:
    """Accelerate's LocalSGD."""
    from accelerate import Accelerator  # +
    from accelerate.local_sgd import LocalSGD  # +

    rank.is_local = True
    os.environ["LOCAL_RANK"] = "0"  # as its launcher sets it; without, it would train alone
    accelerator = Accelerator(cpu=True)  # +
    model, optimizer = accelerator.prepare(*rank.made_model(rank.learning_rate, lambda module: module))  # +
    rank.begin()
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=True
    ) as local_sgd:  # +
        for inputs, targets in _batches(rank):
            rank.train_step(model, optimizer, inputs, targets)
            local_sgd.step()  # +
            if rank.after_step(model):
                break


def torch_post_local(rank: "Rank", period: int) -> None:
    """PyTorch's PostLocalSGDOptimizer: gradients are summed for 50 steps, then parameters averaged now and then."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local  # +
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # +
    from torch.distributed.optim import PostLocalSGDOptimizer  # +

    rank.is_local = True
    model, local = rank.made_model(rank.learning_rate)
    alone, _ = torch.distributed.new_subgroups(group_size=1)  # type: ignore[no-untyped-call] # +
    state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=50)  # type: ignore[no-untyped-call] # +
    model.register_comm_hook(state, post_local.post_localSGD_hook)  # +
    optimizer = PostLocalSGDOptimizer(optim=local, averager=PeriodicModelAverager(period=period, warmup_steps=50))  # +
    rank.begin()
    for inputs, targets in _batches(rank):
        rank.train_step(model, optimizer, inputs, targets)
        if rank.after_step(model):
            break


def torch_powersgd(rank: "Rank", matrix_approximation_rank: int) -> None:
    """PyTorch's PowerSGD hook, after 50 steps without it; on gloo it hangs with several buckets, this model has one."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power  # +

    model, optimizer = rank.made_model(rank.learning_rate)
    state = power.PowerSGDState(None, int(matrix_approximation_rank), start_powerSGD_iter=50)  # +
    model.register_comm_hook(state, power.powerSGD_hook)  # +
    rank.begin()
    for inputs, targets in _batches(rank):
        rank.train_step(model, optimizer, inputs, targets)
        if rank.after_step(model):
            break


# --- OmniLearn -------------------------------------------------------------------------------------------------------


def omnilearn(rank: "Rank", every: int, deadband_threshold: float) -> None:
    """OmniLearn's BSP loop around its own controller, which changes sizes once per epoch, or every so many steps.

    Its training class loads its own models and data by torchvision, so that its loop stands here, line by line but for
    logs, test accuracy and the emulated slowness; `evaluate_bsz` with its arithmetic is theirs.
    """
    names = [f"omnilearn_pytorch.helper.{name}" for name in ("data_partitioner", "models")]
    theirs = {name: ModuleType(name) for name in names}
    size, world_size = rank.local_batch_size, rank.place.world_size
    order = torch.randperm(len(rank.dataset), generator=torch.Generator().manual_seed(rank.place.wanted.seed))
    own = Subset(rank.dataset, order.tolist()[rank.place.rank :: world_size])

    def made_data(bsz: int, **_: Any) -> Any:
        loader = DataLoader(own, batch_size=bsz, shuffle=True)
        return SimpleNamespace(getTrainloader=lambda: loader)

    theirs[names[0]].TrainingTestingDataset = made_data  # type: ignore[attr-defined]
    with patch.dict(sys.modules, theirs):
        from omnilearn_pytorch.dynamic_controller.bsp_omnilearn import BSPOmniLearn  # +
    controller = object.__new__(BSPOmniLearn)  # +
    vars(controller).update(
        args=SimpleNamespace(), rank=rank.place.rank, worldsize=world_size, train_bsz=size, globalB=world_size * size,
        deadband_threshold=deadband_threshold, min_bsz=8, max_bsz=96, global_step=0, async_op=False,
        measured_computetime=[], dataset_name="",
    )  # fmt: skip
    controller.gradient_scaling = 1 / world_size  # +
    model, optimizer = rank.made_model(rank.learning_rate, lambda module: module)
    loss_of = torch.nn.CrossEntropyLoss()
    loader = made_data(size).getTrainloader()
    rank.begin()
    while True:  # +
        for inputs, targets in loader:
            controller.global_step += 1  # +
            begin = perf_counter_ns()  # +
            loss_of(model(inputs), targets).backward()
            controller.measured_computetime.append((perf_counter_ns() - begin) / 1e6)  # +
            for parameter in model.parameters():  # +
                parameter.grad *= controller.gradient_scaling  # +
            for parameter in model.parameters():  # +
                torch.distributed.all_reduce(parameter.grad)  # +
            optimizer.step()
            optimizer.zero_grad()
            if rank.after_step(model):
                return
            if controller.global_step % (every or len(rank.dataset) // controller.globalB) == 0:  # +
                loader = controller.evaluate_bsz(epoch=0)  # +
                break  # +


# --- hivemind --------------------------------------------------------------------------------------------------------


def hivemind_local(rank: "Rank", target_batch_size: int) -> None:
    """The Optimizer of hivemind with local updates: an averaging in background per `target_batch_size` samples of all.

    Each peer makes as many steps as it can. Peers meet at looks only; their averaging goes on meanwhile, off the clock.
    """
    import hivemind  # +

    rank.is_local = rank.is_alone = True
    model, local = rank.made_model(rank.learning_rate, lambda module: module)
    own, peers = [f"/ip4/{NETWORK[2 + rank.place.rank]}/tcp/0"], [[""]]
    if rank.place.rank == 0:
        dht = hivemind.DHT(host_maddrs=own, start=True)
        peers = [[str(address) for address in dht.get_visible_maddrs()]]
    torch.distributed.broadcast_object_list(peers)
    if rank.place.rank:
        dht = hivemind.DHT(host_maddrs=own, initial_peers=peers[0], start=True)  # +
    optimizer = hivemind.Optimizer(  # +
        dht=dht,  # +
        run_id="bench",  # +
        batch_size_per_step=rank.local_batch_size,  # +
        target_batch_size=target_batch_size,  # +
        optimizer=local,  # +
        use_local_updates=True,  # +
        matchmaking_time=1.0,  # +
        averaging_timeout=10.0,  # +
        averager_opts={"request_timeout": 0.5},  # +
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5, "max_refresh_period": 1.0},
    )
    rank.begin()
    for inputs, targets in _batches(rank):
        rank.train_step(model, optimizer, inputs, targets)
        if rank.after_step(model):
            break
    print(f"{optimizer.local_epoch} averagings")
    optimizer.shutdown()  # +
    dht.shutdown()  # +


# --- what bench.cluster needs ----------------------------------------------------------------------------------------


class Other(NamedTuple):
    """An arm of others."""

    package: str
    train: Callable[..., None]
    tried: tuple[dict[str, float], ...]
    """Its settings: arguments of the function."""
    service: str = ""
    """A Python program that runs at the switch meanwhile."""
    shared: Callable[..., None] | None = None
    """A function that it calls and whose lines count, too."""

    @property
    def source(self) -> str:
        """Text that determines its runs."""
        versions = Path(__file__).with_suffix(".txt").read_text()
        return versions + self.service + "".join(inspect.getsource(one) for one in (self.train, self.shared) if one)

    @property
    def num_lines(self) -> int:
        """Lines that a user of plain DDP has to add or change."""
        return sum(line.endswith("# +") for line in self.source.splitlines())


OTHERS = {
    "torchft-local": Other(
        "torchft", torchft_local, ({"sync_every": 8}, {"sync_every": 4}, {"sync_every": 16}), LIGHTHOUSE, _torchft
    ),
    "torchft-diloco": Other(
        "torchft", torchft_diloco, ({"sync_every": 8}, {"sync_every": 4}, {"sync_every": 20}), LIGHTHOUSE, _torchft
    ),
    "accelerate-local": Other(
        "accelerate", accelerate_local, ({"local_sgd_steps": 8}, {"local_sgd_steps": 4}, {"local_sgd_steps": 16})
    ),
    "torch-post-local": Other("torch", torch_post_local, ({"period": 4}, {"period": 8}, {"period": 16})),
    "torch-powersgd": Other("torch", torch_powersgd, tuple({"matrix_approximation_rank": one} for one in (2, 1, 4))),
    "omnilearn": Other(
        "omnilearn_pytorch",
        omnilearn,
        (
            {"every": 50, "deadband_threshold": 0.05},
            {"every": 50, "deadband_threshold": 0.2},
            {"every": 0, "deadband_threshold": 0.2},
        ),
    ),
    "hivemind": Other("hivemind", hivemind_local, tuple({"target_batch_size": size} for size in (8192, 2048, 4096))),
}
