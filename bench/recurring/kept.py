"""Chains that were run, in memory or also in a file, so that a measurement that was cut off goes on."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from bench.harness.command import BenchmarkError

from dynamix.lab.experiments.episodes.pool import EpisodePool
from dynamix.lab.experiments.episodes.provenance import code_digest, versions
from dynamix.runtime import output_files

from .chains import ChainTask

Chain = TypeVar("Chain")


class KeptChain(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file."""

    key: str
    chain: msgspec.Raw


class KeptChains(Generic[Chain]):
    """The chains of one kind; with a file those that it has of the same task and code are not run again."""

    def __init__(self, kind: type[Chain], path: Path | None = None) -> None:
        """Read the file. Raises BenchmarkError when it has a line that is no chain."""
        self._kind = kind
        self._path = path
        self._lines: dict[str, bytes] = {}
        for at, line in enumerate(path.read_bytes().splitlines() if path is not None and path.exists() else (), 1):
            try:
                kept = msgspec.json.decode(line, type=KeptChain)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise BenchmarkError(f"{path}, line {at}, is no chain: {error}; name another file") from None
            self._lines[kept.key] = bytes(kept.chain)

    def run_all(self, pool: EpisodePool, work: Callable[[ChainTask], Chain], tasks: Sequence[ChainTask]) -> list[Chain]:
        """The chains of all tasks in their order; run are those that are not kept."""
        keys = [self._key_of(task) for task in tasks]
        missing = [at for at, key in enumerate(keys) if key not in self._lines]
        for index, chain in pool.run(work, [tasks[at] for at in missing]):
            self._keep(keys[missing[index]], chain)
        return [msgspec.json.decode(self._lines[key], type=self._kind) for key in keys]

    def _key_of(self, task: ChainTask) -> str:
        about = [self._kind.__name__, task, code_digest(), versions()]
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()

    def _keep(self, key: str, chain: Chain) -> None:
        self._lines[key] = msgspec.json.encode(chain)
        if self._path is not None:
            lines = [KeptChain(key=each, chain=msgspec.Raw(found)) for each, found in self._lines.items()]
            output_files.write(self._path, msgspec.json.Encoder().encode_lines(lines), make_parents=True)
