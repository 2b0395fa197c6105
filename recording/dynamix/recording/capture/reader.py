"""Reads a capture block by block, each only after its digest was checked; goes on after a damaged one."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import msgspec

from dynamix.runtime.input_files import check_regular

from . import layout
from .record import CaptureEnd, CaptureError, CaptureHeader, CutOffError, Record, identity_of, window_key_of

SEARCH_BYTES = 1 << 16

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
        CaptureError: when the file is no capture, or at a damaged block; every record before it was good. To iterate
            again then goes on after that block; `good_records` does so.
        CutOffError: a CaptureError, where the file ends before its end was written.
        OSError: when the file cannot be read.

    Attributes:
        header: known once the context is entered.
        end: known once the last record was read, `None` before.
        num_records: records of the blocks read so far.
        faults: what `good_records` left out.
    """

    header: CaptureHeader

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._seed = layout.PREAMBLE
        self._frame_index = -1
        self._frame_offset = 0
        self._offset = 0
        self._last_sequences: dict[str, int] = {}
        self.end: CaptureEnd | None = None
        self.num_records = 0
        self.faults: list[CaptureError] = []

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
        """Iterate over the records that were not read yet."""
        while self.end is None:
            block = self._next_block()
            self.num_records += len(block)
            yield from block

    def good_records(self) -> Iterator[Record]:
        """The records of all good blocks; what is wrong with the others is added to `faults`."""
        while self.end is None:
            try:
                yield from self
            except CaptureError as error:
                self.faults.append(error)
                if isinstance(error, CutOffError):
                    return

    def _next_block(self) -> list[Record]:
        """Read the next block's records; none at the end."""
        kind, body = self._read_frame()
        try:
            if kind == layout.BLOCK:
                block = layout.unpack(layout.decompress(body), self.header.streams)
                self._check_order(block)
                return block
        except ValueError as error:
            raise self._damage(str(error)) from error
        if kind == layout.HEADER:
            raise self._damage("a second header")
        self.end = end = self._decode_json(body, CaptureEnd)
        if self._read_some(1):
            raise self._damage(f"the capture ends at byte {self._offset - 1}, but the file goes on")
        if end.num_records != self.num_records and not self.faults:
            raise self._damage(f"the end declares {end.num_records} records, {self.num_records} are there")
        return []

    def _check_preamble(self) -> None:
        preamble = self._read_some(len(layout.PREAMBLE))
        if preamble[: len(layout.MAGIC)] != layout.MAGIC:
            raise CaptureError(self._path, "this is no capture; `dynamix capture JOB -o FILE` makes one")
        if preamble != layout.PREAMBLE:
            found = preamble[len(layout.MAGIC) :]
            version = f"version {found[0]}" if found else "no version"
            raise CaptureError(self._path, f"a capture of {version}, this program reads {layout.VERSION}")

    def _read_header(self) -> CaptureHeader:
        kind, body = self._read_frame()
        if kind != layout.HEADER:
            raise self._damage("the header is missing")
        return self._decode_json(body, CaptureHeader)

    def _read_frame(self) -> tuple[bytes, bytes]:
        """Read the next frame's kind and body, and check its digest; where it is damaged, go to the next marker."""
        self._frame_index += 1
        self._frame_offset = self._offset
        try:
            head = self._read_exactly(layout.FRAME.size)
            marker, kind, index, length = layout.FRAME.unpack(head)
            if marker != layout.MARKER or kind not in layout.MAX_BODY_BYTES:
                raise self._damage("no block begins here")
            if length > (limit := layout.MAX_BODY_BYTES[kind]):
                raise self._damage(f"a length of {length} bytes, over the limit of {limit}")
            body = self._read_exactly(length)
            digest = hashlib.sha256(self._seed + head + body).digest()
            if self._read_exactly(layout.DIGEST_BYTES) != digest:
                raise self._damage("its content does not match its checksum")
        except CaptureError as error:
            if self._find_marker() and isinstance(error, CutOffError):
                raise self._damage("it goes on beyond the end of the file") from error
            raise
        if index != self._frame_index:
            misplaced = self._damage(f"block {index} stands here")
            if index > self._frame_index:  # some are missing: the next call reads this one
                self._offset = self._frame_offset
                self._opened.seek(self._offset)
            self._frame_index = max(self._frame_index, index) - 1
            raise misplaced
        if index == 0:
            self._seed = digest
        return kind, body

    def _find_marker(self) -> bool:
        """Go to the first marker after the one of this frame; to the end of the file, and False, without one."""
        self._offset = self._frame_offset + 1
        self._opened.seek(self._offset)
        seen = b""
        while chunk := self._opened.read(SEARCH_BYTES):
            seen += chunk
            if (at := seen.find(layout.MARKER)) >= 0:
                self._offset += at
                self._opened.seek(self._offset)
                return True
            self._offset += max(0, len(seen) - len(layout.MARKER) + 1)
            seen = seen[-len(layout.MARKER) + 1 :]
        self._offset += len(seen)
        return False

    def _read_exactly(self, length: int) -> bytes:
        data = self._read_some(length)
        if len(data) < length:
            raise CutOffError(self._path, "the file is cut off here", **self._location())
        return data

    def _read_some(self, length: int) -> bytes:
        data = self._opened.read(length)
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

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None, "used within its context"
        return self._file
