"""The order of an epoch's samples: a permutation of our own, or what the script's samplers draw.

Rank 0 draws for one sampler and sends the numbers to all ranks, so that no difference between processes can make a
sample count twice or never; samplers that divide the samples draw on each rank. They draw under generators seeded by
the epoch: a resumed run gets the same order again.

The fingerprint of the data shows that ranks were given different parts of it: a few samples of a map-style data set are
compared when the ranks attach, a stream is digested as it is read (`stream`).
"""

import copy
import dataclasses
import logging
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler

Order = npt.NDArray[np.int64]
"""Indices of samples."""


T = TypeVar("T")


class Ranks(Protocol):
    """How the ranks of a job tell each other something."""

    rank: int
    world_size: int

    def gather_objects(self, mine: T, *, within_s: float | None = None) -> list[T]:
        """One object of each rank; raises RuntimeError when one does not come within the time."""

    def share_order(self, order: Order, *, waits: bool = True) -> Order:
        """Rank 0's order; what the others pass says how long it is."""


class RandomNumbers(NamedTuple):
    """A state of all generators that a process has by default."""

    of_torch: torch.Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def capture(cls) -> Self:
        """The states that the generators have now."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002 - scripts use it

    def restore(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)  # noqa: NPY002
        random.setstate(self.of_python)


def seed_all(seed: int, epoch: int) -> int:
    """Begin an epoch's numbers; returns what seeds a further generator."""
    value = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    torch.default_generator.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002
    random.seed(value)
    return value


ONE_PART = (
    "must be the same on all ranks, session.loader gives each its part. Take out its division by rank (islice by rank, "
    "Subset, shard, split_dataset_by_node, split_by_node; nodesplitter=None in webdataset), or seed the random numbers "
    "that it is made of"
)
"""The fix, for an error."""

PROBE_S = 5.0
"""Seconds after which no further sample of a map-style data set is read for the comparison."""
MOST_ELEMENTS = 256
"""Number of elements of a tensor or a text that are digested, evenly spread."""
MOST_NUMBERS = 64
"""Most elements of a list that are digested."""

Pieces = list["bytes | npt.NDArray[Any] | None"]
"""The parts of a sample; `None` for one that is random."""

_log = logging.getLogger("dynamix.trainer")


def _read(dataset: Any, indices: Sequence[int], seed: int, options: Mapping[str, Any]) -> list[Pieces]:
    """The samples as far as they can be read."""
    outside, began = RandomNumbers.capture(), None
    num_workers = min(options.get("num_workers", 0), 1)
    found: list[Pieces] = []
    try:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=[index for index in indices for _ in range(2)],
            collate_fn=partial(_read_one, seed),
            num_workers=num_workers,
            worker_init_fn=partial(_begin_worker, seed, options.get("worker_init_fn")),
            multiprocessing_context=options.get("multiprocessing_context"),
            timeout=(options.get("timeout") or 6 * PROBE_S) if num_workers else 0,
        )
        readings = iter(loader)
        seed_all(seed, 0)
        for first, second in zip(readings, readings, strict=True):
            found.append([one if _are_alike(one, again) else None for one, again in zip(first, second, strict=True)])
            began = began or time.monotonic()  # workers may take seconds to start
            if time.monotonic() - began > PROBE_S:
                break
    except Exception as error:  # noqa: BLE001 - whatever the script's code raises: the training will too, if it is wrong
        _log.info("cannot read samples to compare them between ranks: %r", error)
    finally:
        outside.restore()
    return found


def _read_one(seed: int, sample: Any) -> Pieces:
    """The parts of a sample, with equal random numbers for the next one; in place of `collate_fn`."""
    parts = _pieces(sample, [])
    seed_all(seed, 0)
    return parts


def _begin_worker(seed: int, own: Callable[[int], None] | None, worker: int) -> None:
    if own is not None:
        own(worker)
    seed_all(seed, 0)


def _are_alike(one: bytes | npt.NDArray[Any] | None, other: bytes | npt.NDArray[Any] | None) -> bool:
    """Whether parts of a sample are the same, numbers with a fraction up to rounding: processors differ."""
    if one is None or other is None:
        return True
    if isinstance(one, bytes) or isinstance(other, bytes) or one.dtype.kind != "f":
        return np.array_equal(one, other)
    ours, theirs = np.nan_to_num(one), np.nan_to_num(other)
    return ours.shape == theirs.shape and np.allclose(ours, theirs, 1e-3, 1e-3 * np.abs(ours).max(initial=0.0))


def digest(value: Any, before: int = 0) -> int:
    """A number of 32 bits that differs between samples of numbers, text and tensors; `before` is that of earlier ones.

    Of long ones it takes evenly spread elements, so that it costs microseconds.
    """
    parts = [part.tobytes() if isinstance(part, np.ndarray) else part for part in _pieces(value, [])]
    return zlib.crc32(b"\0".join([*parts, b""]), before)


def _pieces(value: Any, found: list[Any]) -> list[Any]:
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
        found.append(np.array([value]) if isinstance(value, (float, np.floating)) else repr(value).encode())
    elif isinstance(value, (list, tuple)):
        few = value[:: len(value) // MOST_NUMBERS or 1]
        if all(type(item) is int or type(item) is float for item in few):
            found.append(np.array(few, float) if any(type(item) is float for item in few) else repr(few).encode())
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


OwnSampler = Callable[[int], Sequence[int]] | Sampler[int]
"""A script's own: a function of the epoch's number, or a sampler of torch."""

NOT_DRAWN = np.iinfo(np.int64).min
"""Sent by rank 0 instead of an index if its sampler failed."""


class DataIdentity(NamedTuple):
    """Identity of the order of the samples; a position means nothing in another order."""

    num_samples: int
    seed: int
    shuffle: bool
    sampler: str = ""
    """Name of the script's own sampler."""
    num_tokens: int | None = None
    """Tokens of an epoch, where samples count by their tokens."""

    @property
    def size(self) -> int:
        """Size of an epoch in what batch sizes count: samples or tokens."""
        return self.num_samples if self.num_tokens is None else self.num_tokens


class _Drawn(NamedTuple):
    """The order of an epoch."""

    order: Order
    digest: int
    """Tells it apart from others."""
    script_epoch: Any
    """The epoch's number in the sampler."""


class Orders:
    """The orders of all epochs, equal on all ranks."""

    stride = 1
    """Ranks whose samples follow one another in a step, the first of each and then the second; 1: those of one rank."""

    def __init__(self, identity: DataIdentity, sampler: Any = None) -> None:
        self.identity = identity
        self._sampler = sampler
        """The script's own, if it draws the orders, perhaps by an epoch's number that the script has set in it."""
        self._ranks: Ranks
        """Once connected."""
        self._token_counts: Order | None = None
        self._newest: dict[int, _Drawn] = {}
        """Orders of the two epochs drawn last: a loop inside of another looks at the beginning of the next one."""
        self._ends: tuple[int, Order] | None = None
        self.expected: tuple[int, int] | None = None
        """An epoch, and the digest that its order had in a saved run: another one is refused."""

    def connect(self, ranks: Ranks, dataset: Dataset[Any], loader_options: Mapping[str, Any]) -> None:
        """Communicate with the other ranks from now on; a collective call, which compares a few samples by index.

        They are read as the training reads them: with workers in one of these, since a handle that `__getitem__` opens
        must not be shared with them. Each is read twice under equal random numbers: what differs then is random by
        numbers of another source, and not compared. What cannot be read is left to the training.

        Raises:
            ValueError: on all ranks, when their data sets are seen to differ.
        """
        self._ranks = ranks
        if ranks.world_size == 1:
            return
        last = len(dataset) - 1 if isinstance(dataset, Sized) else 0
        indices = sorted({0, last // 3, 2 * last // 3, last})
        everybody = ranks.gather_objects(_read(dataset, indices, self.identity.seed, loader_options))
        is_random = False
        for number, index in enumerate(indices):
            read = [(rank, samples[number]) for rank, samples in enumerate(everybody) if number < len(samples)]
            is_random = is_random or any(part is None for _, parts in read for part in parts)
            for rank, parts in read:
                first = read[0][1]
                if not (len(first) == len(parts) and all(map(_are_alike, first, parts))):
                    raise ValueError(
                        f"the data set differs between ranks (sample {index} of the {type(dataset).__name__}, ranks "
                        f"{read[0][0]} and {rank}), it {ONE_PART}"
                    )
        if is_random and ranks.rank == 0:
            _log.warning(
                "the samples of the %s are random by other numbers than torch's, numpy's and Python's global ones, so "
                "that they cannot be compared between ranks: make sure that each rank has the whole data set, not a "
                "part of it",
                type(dataset).__name__,
            )

    def count_by_tokens(self, token_counts: Sequence[int], dataset: object, *, most: int) -> None:
        """Count each sample of a data set by its tokens instead of as one.

        Raises:
            ValueError: when the counts are not one whole number per sample, are all 0, or one is above `most`.
        """
        counts = np.asarray(token_counts)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or counts.min(initial=0) < 0 or counts.sum() < 1:
            raise ValueError("token_counts: pass one whole number per sample, not negative and not all 0")
        if isinstance(dataset, Sized) and len(counts) != len(dataset):
            raise ValueError(f"token_counts: {len(counts)} numbers for {len(dataset)} samples")
        if counts.max() > most:
            raise ValueError(
                f"token_counts: a sample has {counts.max()} tokens, but a batch at most {most} (max_local_batch_size, "
                "micro_batch_size), for sizes are in tokens: raise the bound or cut the sample"
            )
        self._token_counts = counts.astype(np.int64)
        num_tokens = round(int(counts.sum()) * self.identity.num_samples / len(counts))
        self.identity = self.identity._replace(num_tokens=num_tokens)

    def ends_of(self, epoch: int) -> Order | None:
        """Tokens of an epoch up to and with each sample of its order; `None` where samples count by themselves.

        Raises:
            ValueError: when the epoch has no token that counts.
        """
        if self._token_counts is None:
            return None
        if self._ends is None or self._ends[0] != epoch:
            ends: Order = np.cumsum(self._token_counts[self.order_of(epoch)])
            if ends[-1] < 1:
                raise ValueError(f"token_counts: epoch {epoch} has no token that counts")
            self._ends = (epoch, ends)
        return self._ends[1]

    def size_of(self, epoch: int) -> int:
        """Samples or tokens of an epoch."""
        ends = self.ends_of(epoch)
        return self.identity.num_samples if ends is None else int(ends[-1])

    def order_of(self, epoch: int) -> Order:
        """The samples of an epoch, in order; those of the two newest epochs are kept.

        Raises:
            ValueError: when a sampler draws another number of samples than at first, or no indices; on all ranks, when
                it draws another order than in a saved run.
            RuntimeError: when another rank has failed.
        """
        if epoch not in self._newest:
            while len(self._newest) > 1:
                del self._newest[min(self._newest)]
            order = self._make_order(epoch)
            script_epoch = getattr(self._sampler, "epoch", None)  # some count on while they draw
            self._newest[epoch] = _Drawn(order, zlib.crc32(order.data), script_epoch)
        found = self._newest[epoch]
        if self.expected is not None and self.expected[0] == epoch and self.expected[1] != found.digest:
            raise ValueError(
                f"sampler: {self.identity.sampler} draws another order for epoch {epoch} than in the saved run, so "
                "samples would be repeated or left out: seed the script alike, begin its loop at the saved epoch, and "
                "let a sampler depend on set_epoch and on the random numbers of torch, numpy and Python only"
            )
        return found.order

    @property
    def script_epoch(self) -> int:
        """The epoch that the script has set in its sampler, or the sampler itself."""
        epoch = getattr(self._sampler, "epoch", 0)
        return epoch if isinstance(epoch, int) else 0

    def begin(self, epoch: int) -> None:
        """Begin a loop over an epoch: draw it again if the script has set another number in its sampler since."""
        drawn = self._newest.get(epoch)
        if drawn is None or drawn.script_epoch != getattr(self._sampler, "epoch", None):
            self._newest.pop(epoch, None)
            self._ends = None

    def digest_of(self, epoch: int) -> int | None:
        """Digest of an epoch's order, for a checkpoint, if it was drawn."""
        return self._newest[epoch].digest if epoch in self._newest else None

    def _make_order(self, epoch: int) -> Order:
        """The order of an epoch; a stream is not indexed."""
        raise NotImplementedError


class Permutations(Orders):
    """Every sample once per epoch, shuffled by the seed; no communication."""

    def __init__(self, num_samples: int, seed: int, *, shuffle: bool) -> None:
        super().__init__(DataIdentity(num_samples, seed, shuffle))

    def _make_order(self, epoch: int) -> Order:
        data = self.identity
        return epoch_order(data.num_samples, data.seed, epoch, shuffle=data.shuffle)


MOST_DRAWN = 1 << 31
"""Samples of an epoch that are drawn at once: 16 GB of indices."""


class DistributedOrders(Orders):
    """Orders of torch's `DistributedSampler`, without the samples that it repeats; no communication.

    Of equal batches each rank has the samples of plain training.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        num_samples = min(sampler.total_size, len(sampler.dataset))  # type: ignore[arg-type]
        super().__init__(DataIdentity(num_samples, sampler.seed, sampler.shuffle, type(sampler).__name__), sampler)
        self.stride = sampler.num_replicas

    def _make_order(self, _epoch: int) -> Order:
        alone = copy.copy(self._sampler)
        alone.num_replicas, alone.rank, alone.num_samples = 1, 0, alone.total_size
        return np.fromiter(alone, np.int64)[: self.identity.num_samples]


class SampledOrders(Orders):
    """Orders that are drawn in rank 0, for all ranks; every new epoch is a collective call."""

    def __init__(self, sampler: OwnSampler, seed: int, *, sets_epoch: bool = True, world_size: int = 1) -> None:
        """Find out how many samples an epoch has; the sampler of each rank of `world_size` draws as many.

        With `sets_epoch` the sampler is told the epoch's number, else the script does it.

        Raises:
            ValueError: when the sampler divides samples among ranks, makes batches, or draws nothing, or too many.
        """
        name: str = getattr(sampler, "__name__", type(sampler).__name__)
        # a script may seed its ranks differently
        super().__init__(DataIdentity(0, seed if sets_epoch else 0, shuffle=True, sampler=name), sampler)
        if sets_epoch and getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"sampler: {name} gives each rank a part of the samples, which session.loader does itself: pass "
                "what it samples from, or nothing, and not the shuffle=False that a DataLoader has beside it"
            )
        self.seed = seed
        self._sets_epoch = sets_epoch
        self._num_drawn: int | None = None
        self._num_drawn = num_drawn = len(sampler) if isinstance(sampler, Sized) else len(self._draw(0))
        if num_drawn < 1:
            raise ValueError(f"sampler: {name} draws no sample")
        if num_drawn > MOST_DRAWN:
            raise ValueError(
                f"sampler: {name} draws {num_drawn} samples in an epoch, whose order is drawn at once: let it "
                f"draw at most {MOST_DRAWN}, such as len(dataset), and loop over epochs"
            )
        self.identity = self.identity._replace(num_samples=num_drawn * world_size)

    def _make_order(self, epoch: int) -> Order:
        failed = np.full(self.identity.num_samples, NOT_DRAWN)
        if self._ranks.rank > 0:
            order = self._ranks.share_order(failed)
            if order[0] == NOT_DRAWN:
                raise RuntimeError(f"rank 0 could not draw the order of epoch {epoch}: its error says why")
            return order
        try:
            order = self._draw(epoch)
        except BaseException:
            self._ranks.share_order(failed)
            raise
        return self._ranks.share_order(order, waits=False)  # it may be the only one to look at a batch now

    def _draw(self, epoch: int) -> Order:
        """The sampler's indices, by random numbers that are seeded for it and put back afterwards."""
        sampler, name, before = self._sampler, self.identity.sampler, RandomNumbers.capture()
        own = getattr(sampler, "generator", None)
        generator = own if isinstance(own, torch.Generator) else torch.Generator()
        own_before = generator.get_state()
        try:
            generator.manual_seed(seed_all(self.seed, epoch))
            if self._sets_epoch and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            drawn = sampler(epoch) if callable(sampler) else list(sampler)
        finally:
            before.restore()
            generator.set_state(own_before)
        try:
            order = np.asarray(drawn)
        except ValueError:  # batches of unequal lengths
            order = np.empty((0, 0))
        if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu"):
            raise ValueError(
                f"sampler: {name} must yield indices, one whole number after the other; session.loader makes the "
                "batches: of a batch sampler pass the sampler inside it"
            )
        if self._num_drawn not in (None, len(order)):
            raise ValueError(
                f"sampler: {name} draws {len(order)} samples in epoch {epoch}, but {self._num_drawn} at first: "
                "all epochs must have the same number"
            )
        return order.astype(np.int64)


class InterleavedOrders(SampledOrders):
    """Orders that the samplers of all ranks draw, one sample of each in turn; every new epoch is a collective call.

    Of equal batches each rank has the samples of plain training.
    """

    def __init__(self, sampler: OwnSampler, seed: int, world_size: int) -> None:
        super().__init__(sampler, seed, sets_epoch=False, world_size=world_size)
        self.stride = world_size

    def connect(self, ranks: Ranks, dataset: Dataset[Any], loader_options: Mapping[str, Any]) -> None:
        """As `Orders.connect`; warns of samplers that do not divide the data set."""
        super().connect(ranks, dataset, loader_options)
        if ranks.rank == 0 and isinstance(self._sampler, RandomSampler | SequentialSampler):
            _log.warning(
                "the %s of each rank's loader draws all samples, so that an epoch uses each sample %d times, with "
                "dynamix and without: give the loader a DistributedSampler to divide them",
                self.identity.sampler,
                ranks.world_size,
            )

    def _make_order(self, epoch: int) -> Order:
        mine: Order | None = None
        try:
            mine = self._draw(epoch)
        finally:
            everybody = self._ranks.gather_objects(mine)
        drawn = [order for order in everybody if order is not None]
        if len(drawn) < len(everybody) or len({len(order) for order in drawn}) > 1:
            raise RuntimeError(
                f"the samplers of {len(everybody)} ranks must draw equally many samples in epoch {epoch}, but draw "
                f"{[None if order is None else len(order) for order in everybody][:16]}; None is one that failed"
            )
        return np.stack(drawn, axis=1).ravel()


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> Order:
    """The order of an epoch's samples: a permutation that depends on seed and epoch only."""
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        np.random.default_rng((seed, epoch)).shuffle(order)
    return order
