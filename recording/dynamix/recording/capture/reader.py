"""Reads a capture block by block, each only after its digest was checked."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import msgspec

from dynamix.runtime.input_files import check_regular

from . import layout
from .record import CaptureEnd, CaptureError, CaptureHeader, CutOffError, Record, identity_of, window_key_of

S = TypeVar("S", bound=msgspec.Struct)


def read_header(path: Path | str) -> CaptureHeader:
    """Read the header of a capture. Raises as `CaptureReader`."""
    with CaptureReader(path) as reader:
        return reader.header


def records(path: Path | str) -> Iterator[Record]:
    """Read the records of a capture in order. Raises as `CaptureReader`, also after the last good record."""
    with CaptureReader(path) as reader:
        yield from reader


def first_generation(path: Path) -> int:
    """The first generation that a capture has a message of, 0 when it has none. Raises as `records`."""
    found = (window_key_of(identity_of(record)) for record in records(path))
    return next((key.generation for key in found if key is not None), 0)


class CaptureReader:
    """`with CaptureReader(path) as reader: for record in reader: ...`. Memory does not grow with the file.

    Raises:
        CaptureError: when the file is no capture, or at the damaged block; every record before it was good.
        CutOffError: a CaptureError, where the file ends before its end was written.
        OSError: when the file cannot be read.

    Attributes:
        header: known once the context is entered.
        end: known once the last record was read, `None` before.
        num_records: records of the blocks read so far.
    """

    header: CaptureHeader

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._frame_index = -1
        self._frame_offset = 0
        self._offset = 0
        self._last_sequences: dict[str, int] = {}
        self.end: CaptureEnd | None = None
        self.num_records = 0

    def __enter__(self) -> Self:
        check_regular(self._path)
        self._file = self._path.open("rb")
        try:
            self._check_preamble()
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records, once per reader."""
        while self.end is None:
            block = self._next_block()
            self.num_records += len(block)
            yield from block

    def _next_block(self) -> list[Record]:
        """Read the next block's records; none at the end."""
        kind, body = self._read_frame()
        if kind == layout.BLOCK:
            try:
                block = layout.unpack(layout.decompress(body), self.header.streams)
                self._check_order(block)
            except ValueError as error:
                raise self._damage(str(error)) from error
            return block
        if kind != layout.END:
            raise self._damage("a second header")
        end = self._decode_json(body, CaptureEnd)
        if end.num_records != self.num_records:
            raise self._damage(f"the end declares {end.num_records} records, {self.num_records} are there")
        if self._read_some(1):
            raise self._damage(f"the capture ends at byte {self._offset - 1}, but the file goes on")
        self.end = end
        return []

    def _check_preamble(self) -> None:
        preamble = self._read_some(len(layout.PREAMBLE))
        if preamble[: len(layout.MAGIC)] != layout.MAGIC:
            raise CaptureError(self._path, "this is no capture; `dynamix capture JOB -o FILE` makes one")
        if preamble != layout.PREAMBLE:
            found = preamble[len(layout.MAGIC) :]
            version = f"version {found[0]}" if found else "no version"
            raise CaptureError(self._path, f"a capture of {version}, this program reads {layout.VERSION}")
        self._digest.update(preamble)

    def _read_header(self) -> CaptureHeader:
        kind, body = self._read_frame()
        if kind != layout.HEADER:
            raise self._damage("the header is missing")
        return self._decode_json(body, CaptureHeader)

    def _read_frame(self) -> tuple[bytes, bytes]:
        """Read the next frame's kind and body, and check its digest."""
        self._frame_index += 1
        self._frame_offset = self._offset
        head = self._read_exactly(layout.FRAME.size)
        kind, length = layout.FRAME.unpack(head)
        limit = layout.MAX_BODY_BYTES.get(kind)
        if limit is None:
            raise self._damage(f"a block of unknown kind {kind!r}")
        if length > limit:
            raise self._damage(f"a length of {length} bytes, over the limit of {limit}")
        body = self._read_exactly(length)
        self._digest.update(head + body)
        expected = self._digest.digest()
        digest = self._read_exactly(layout.DIGEST_BYTES)
        if digest != expected:
            raise self._damage("its content does not match its checksum")
        self._digest.update(digest)
        return kind, body

    def _read_exactly(self, length: int) -> bytes:
        data = self._read_some(length)
        if len(data) < length:
            raise CutOffError(self._path, "the file is cut off here", **self._location())
        return data

    def _read_some(self, length: int) -> bytes:
        assert self._file is not None, "used within its context"
        data = self._file.read(length)
        self._offset += len(data)
        return data

    def _decode_json(self, body: bytes, kind: type[S]) -> S:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damage(f"not a {kind.__name__}: {error}") from error

    def _check_order(self, block: list[Record]) -> None:
        last = self._last_sequences
        for record in block:
            if record.sequence <= last.get(record.stream, 0):
                raise ValueError(f"{record.stream} {record.sequence} comes after {last[record.stream]}: not in order")
            last[record.stream] = record.sequence

    def _damage(self, reason: str) -> CaptureError:
        return CaptureError(self._path, reason, **self._location())

    def _location(self) -> dict[str, int]:
        return {"block": self._frame_index, "offset": self._frame_offset, "num_records": self.num_records}
