"""Data of Hugging Face's datasets, webdataset and torchdata: each sample once, resumed at the sample, or refused."""

import importlib.util
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import MOVES, MOVING, gathered
from tests.support.ranks import run_ranks
from tests.support.training import begin_job, distribute, offer
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from dynamix.trainer import Session

pytestmark = pytest.mark.slow  # these come first: ranks that are forked after parquet was read can hang

NUM_SAMPLES, NUM_SHARDS = 120, 4

Make = Callable[[Path], Any]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A directory of shards, as JSON lines and as tar files."""
    samples = [{"x": [float(index), 1.0], "index": index} for index in range(NUM_SAMPLES)]
    for shard in range(NUM_SHARDS):
        lines = [json.dumps(sample) for sample in samples[shard::NUM_SHARDS]]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number, line in enumerate(lines):
                member = tarfile.TarInfo(f"{number:06d}.json")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line.encode()))
    return tmp_path


def _rows(shards: Path) -> Any:
    from datasets import Dataset as Table  # noqa: PLC0415 - where it is installed

    lines = [line for path in sorted(shards.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return Table.from_list([json.loads(line) for line in lines]).with_format("torch")


def _streamed(shards: Path) -> Any:
    from datasets import load_dataset  # noqa: PLC0415

    files = [str(path) for path in sorted(shards.glob("*.jsonl"))]
    stream = load_dataset("json", data_files=files, streaming=True, split="train", cache_dir=str(shards / "cache"))
    return stream.shuffle(seed=3, buffer_size=20).with_format("torch")


def _tars(shards: Path, **options: Any) -> Any:
    import webdataset  # noqa: PLC0415

    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    return webdataset.WebDataset(urls, **{"shardshuffle": False, "nodesplitter": None, **options})


class Numbers:
    """Python's random numbers, in a form that workers can be sent."""

    randint = staticmethod(random.randint)


def _decoded(shards: Path) -> Any:
    """What the README says of webdataset."""
    import webdataset as wds  # noqa: PLC0415

    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    return wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.shuffle(len(urls), rng=Numbers()),
        wds.tarfile_to_samples(),
        wds.shuffle(20, rng=Numbers()),
        wds.decode(),
        wds.map(_numbers),
    )


def _numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.tensor(sample["json"]["x"]), "index": sample["json"]["index"]}


class Nodes(IterableDataset[Any]):
    """What the README says of torchdata's nodes."""

    def __init__(self, samples: Dataset[Any]) -> None:
        from torchdata.nodes import IterableWrapper, Loader  # noqa: PLC0415

        self.loader = Loader(IterableWrapper(samples))

    def __iter__(self) -> Any:
        return iter(self.loader)


def _nodes(shards: Path) -> Any:
    return Nodes(_rows(shards))


def _attach(dataset: Any, num_workers: int = 0) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return begin_job(dataset, distribute(nn.Linear(2, 1)), rate=1e-6, num_workers=num_workers, **MOVING)


def _train(
    session: Session, model: nn.Module, optimizer: Any, save_at: int | None = None
) -> tuple[list[list[int]], dict[str, Any], list[int]]:
    """The samples of two epochs, a state in the second one, and the samples from there."""
    epochs: list[list[int]] = []
    state, tail = {}, []
    for epoch in session.epochs(2):
        epochs.append([])
        for batch_index, batch in enumerate(session.loader):
            model(batch["x"].float()).sum().backward()
            optimizer.step()
            used = batch["index"][: session.num_samples].tolist()
            offer(session, MOVES[(session.step_index + 1) % len(MOVES)])
            session.step()
            epochs[-1] += used
            tail += used if state else []
            if (epoch, batch_index) == (1, save_at):
                state = session.state_dict()
    session.close()
    return epochs, state, tail


def _use(_rank: int, make: Make, shards: Path, num_workers: int) -> tuple[list[list[int]], list[int], list[int]]:
    epochs, state, tail = _train(*_attach(make(shards), num_workers), save_at=3)
    together = [gathered(epoch) for epoch in epochs]
    session, model, optimizer = _attach(make(shards), num_workers)
    session.load_state_dict(state)
    again, _, _ = _train(session, model, optimizer)
    return together, tail, again[-1]


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")


@pytest.mark.parametrize(
    ("package", "make", "num_workers"),
    [("datasets", _rows, 0), ("datasets", _streamed, 0), ("webdataset", _decoded, 0), ("webdataset", _decoded, 2),
     ("torchdata", _nodes, 0)],
)  # fmt: skip
def test_each_sample_is_used_once_and_a_resumed_run_goes_on_at_the_sample(
    package: str, make: Make, num_workers: int, shards: Path
) -> None:
    _needs(package)
    for epochs, tail, again in run_ranks(_use, 2, make, shards, num_workers):
        assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_SAMPLES))] * 2
        assert tail == again
        assert len(tail) > 5
        assert make is not _decoded or epochs[0] != epochs[1]


def _divided_rows(rank: int, shards: Path) -> None:
    from datasets.distributed import split_dataset_by_node  # noqa: PLC0415

    with pytest.raises(ValueError, match="the data set differs between ranks"):
        _attach(split_dataset_by_node(_rows(shards), rank, 2))
    with pytest.raises(ValueError, match=r"is a stream that differs between ranks.*split_dataset_by_node"):
        _attach(split_dataset_by_node(_streamed(shards), rank, 2))


def _divided_tars(_rank: int, shards: Path) -> None:
    import webdataset as wds  # noqa: PLC0415

    with pytest.raises(ValueError, match=r"is a stream that differs between ranks.*nodesplitter=None in webdataset"):
        _attach(_tars(shards, nodesplitter=wds.split_by_node))


@pytest.mark.parametrize(("package", "refused"), [("datasets", _divided_rows), ("webdataset", _divided_tars)])
def test_data_divided_by_rank_are_refused(package: str, refused: Callable[..., None], shards: Path) -> None:
    _needs(package)
    run_ranks(refused, 2, shards)
