"""The fingerprint of data: by it the ranks find out that each was given a part, or data of its own.

Without it that would pass unseen: every rank would use a slice of its own part. Of a map-style data set some samples
are read when the ranks attach, of a stream all samples are digested as they are read (`stream`).
"""

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from .random_numbers import RandomNumbers, seed_all

T = TypeVar("T")

ONE_PART = (
    "must be the same on all ranks, session.loader gives each its part. Take out its division by rank (islice by rank, "
    "Subset, shard, split_dataset_by_node, split_by_node), or seed the random numbers that it is made of"
)
"""The fix, for an error."""

PROBE_S = 5.0
"""No further sample of a map-style data set is read to compare it after so long."""
MOST_ELEMENTS = 256
"""How much of a tensor or a text is digested, evenly spread."""
MOST_NUMBERS = 64
"""How many of these numbers of a tensor with a fraction are compared to rounding: nodes differ in their processors."""

Marks = list["int | list[float] | None"]
"""The digest of each part of a sample, or some of its numbers with a fraction; `None` where it is random."""

_log = logging.getLogger("dynamix.trainer")


class ObjectExchange(Protocol):
    """How ranks tell each other something."""

    rank: int
    world_size: int

    def gather_objects(self, mine: T) -> list[T]:
        """One object of each rank."""


def compare_samples(dataset: Any, seed: int, exchange: ObjectExchange, options: Mapping[str, Any]) -> None:
    """Compare a few samples of a map-style data set between ranks, by index; a collective call.

    They are read as the training reads them (`options` are the loader's): with workers in one of these, since a handle
    that `__getitem__` opens must not be shared with them. Each is read twice under equal random numbers: what differs
    then is random by numbers of another source, and not compared. What cannot be read is left to the training.

    Raises:
        ValueError: on all ranks, when a sample differs.
    """
    if exchange.world_size == 1:
        return
    last = len(dataset) - 1 if isinstance(dataset, Sized) else 0
    indices = sorted({0, last // 3, 2 * last // 3, last})
    everybody = exchange.gather_objects(_read(dataset, indices, seed, options))
    is_random = False
    for number, index in enumerate(indices):
        read = [(rank, marks[number]) for rank, marks in enumerate(everybody) if number < len(marks)]
        is_random = is_random or any(marks is None or None in marks for _, marks in read)
        for rank, marks in read:
            if not _are_alike(read[0][1], marks):
                raise ValueError(
                    f"the data set differs between ranks (sample {index} of the {type(dataset).__name__}, ranks "
                    f"{read[0][0]} and {rank}), it {ONE_PART}"
                )
    if is_random and exchange.rank == 0:
        _log.warning(
            "the samples of the %s are random by other numbers than torch's, numpy's and Python's global ones, so that "
            "they cannot be compared between ranks: make sure that each rank has the whole data set, not a part of it",
            type(dataset).__name__,
        )


def _read(dataset: Any, indices: Sequence[int], seed: int, options: Mapping[str, Any]) -> list[Marks | None]:
    """The marks of the samples as far as they can be read; `None` for one that is random as a whole."""
    outside, began = RandomNumbers.capture(), None
    num_workers = min(options.get("num_workers", 0), 1)
    found: list[Marks | None] = []
    try:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=[index for index in indices for _ in range(2)],
            collate_fn=_Mark(seed),
            num_workers=num_workers,
            worker_init_fn=_Begin(seed, options.get("worker_init_fn")),
            multiprocessing_context=options.get("multiprocessing_context"),
            timeout=(options.get("timeout") or 6 * PROBE_S) if num_workers else 0,
        )
        readings = iter(loader)
        seed_all(seed, 0)
        for first, second in zip(readings, readings, strict=True):
            same = [ours if ours == again else None for ours, again in zip(first, second, strict=False)]
            found.append(same if len(first) == len(second) else None)
            began = began or time.monotonic()  # workers may take seconds to start
            if time.monotonic() - began > PROBE_S:
                break
    except Exception as error:  # noqa: BLE001 - whatever the script's code raises: the training will too, if it is wrong
        _log.info("cannot read samples to compare them between ranks: %r", error)
    finally:
        outside.restore()
    return found


class _Mark:
    """Stands for `collate_fn`: the marks of a sample, and equal random numbers for the next one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, sample: Any) -> Marks:
        marks: Marks = []
        for piece in _pieces(sample, []):
            if isinstance(piece, np.ndarray) and piece.dtype.kind == "f":
                marks.append(np.nan_to_num(piece[:: max(1, len(piece) // MOST_NUMBERS)]).astype(float).tolist())
            else:
                marks.append(zlib.crc32(_raw(piece)))
        seed_all(self._seed, 0)
        return marks


class _Begin:
    """Stands for `worker_init_fn`: the script's own, and random numbers that are equal on all ranks."""

    def __init__(self, seed: int, own: Callable[[int], None] | None) -> None:
        self._seed = seed
        self._own = own

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        seed_all(self._seed, 0)


def _are_alike(ours: Marks | None, theirs: Marks | None) -> bool:
    """Whether a sample can be the same on two ranks: where it is random, it can."""
    if ours is None or theirs is None:
        return True
    return len(ours) == len(theirs) and all(
        one is None or other is None or _is_same_part(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _is_same_part(one: int | list[float], other: int | list[float]) -> bool:
    if isinstance(one, int) or isinstance(other, int) or len(one) != len(other):
        return one == other
    return np.allclose(one, other, rtol=1e-3, atol=1e-3 * max(map(abs, one), default=0.0))


def divides_by_rank(stream: Any) -> str | None:
    """What divides a stream by rank, where its class tells."""
    if getattr(stream, "_distributed", None) is not None:  # of Hugging Face's datasets
        return "split_dataset_by_node"
    names = {getattr(stage, "__name__", "") for stage in stages_of(stream)}
    return next((name for name in ("split_by_node", "single_node_only") if name in names), None)


def makes_batches(stream: Any) -> bool:
    """Whether a webdataset pipeline yields batches instead of samples."""
    return any(getattr(getattr(stage, "f", None), "__name__", "") == "_batched" for stage in stages_of(stream))


def seeds_of(stream: Any) -> list[Any]:
    """The seeds by which a webdataset pipeline shuffles: orders of a few shards can differ and begin alike."""
    stages = stages_of(stream)
    curried = [stage.kw for stage in stages if any(getattr(stage, "args", ()))]  # shuffle(0) shuffles nothing
    return curried + [stage.seed for stage in stages if getattr(stage, "bufsize", 0)]


def stages_of(stream: Any) -> list[Any]:
    """The stages of a webdataset pipeline; of anything else none."""
    stages = getattr(stream, "pipeline", None)
    return stages if isinstance(stages, list) else []


def digest(value: Any, before: int = 0) -> int:
    """A number of 32 bits that differs between samples of numbers, text and tensors; `before` is that of earlier ones.

    Of long ones it takes evenly spread elements, so that it costs microseconds.
    """
    return zlib.crc32(b"\0".join([*map(_raw, _pieces(value, [])), b""]), before)


def _raw(piece: bytes | npt.NDArray[Any]) -> bytes:
    return piece if isinstance(piece, bytes) else piece.tobytes()


def _pieces(value: Any, found: list[bytes | npt.NDArray[Any]]) -> list[bytes | npt.NDArray[Any]]:
    """Append the parts of a sample to `found`, of each at most twice `MOST_ELEMENTS` evenly spread elements."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype != object:
        flat = value.ravel("K")  # in the order of memory: no copy of what was transposed
        found.append(flat[:: flat.size // MOST_ELEMENTS or 1])
    elif isinstance(value, (str, bytes)):  # a tuple: a union of types takes twenty times as long
        text = value[:: len(value) // MOST_ELEMENTS or 1]
        found.append(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    elif value is None or isinstance(value, (int, float, np.generic)):
        found.append(repr(value).encode())
    elif isinstance(value, (list, tuple)):
        few = value[:: len(value) // MOST_NUMBERS or 1]
        if all(type(item) is int or type(item) is float for item in few):
            found.append(repr(few).encode())
        else:
            for item in few:
                _pieces(item, found)
    elif isinstance(value, Mapping):
        _pieces(list(value.values()), found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _pieces([getattr(value, field.name) for field in dataclasses.fields(value)], found)
    else:
        found.append(type(value).__name__.encode())
    return found
