"""Writes a capture; flushed records stay readable when the writer is killed."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from dynamix.runtime import output_files

from . import layout
from .record import CaptureEnd, CaptureHeader, EndReason, Record, StreamRange, fits


class CaptureWriter:
    """`with CaptureWriter(path, header) as writer: writer.write_record(record)`; `finish` completes the file.

    Leaving the context without an error finishes it, too. After an error or a kill a reader finds the records so far,
    and reports the file as cut off.

    Attributes:
        num_records: records written.
        num_bytes: bytes of the file so far, without the block that is not complete.
        num_left_out: records that do not fit (`dynamix.recording.capture.fits`).
    """

    def __init__(self, path: Path | str, header: CaptureHeader, *, overwrite: bool = False) -> None:
        self._path = Path(path)
        self._mode = "wb" if overwrite else "xb"
        self._header = header
        self._streams = {stream: index for index, stream in enumerate(header.streams)}
        self._ranges: dict[str, StreamRange] = {}
        self._block = bytearray()
        self._seed = layout.PREAMBLE
        self._file: BinaryIO | None = None
        self._is_finished = False
        self._num_frames = 0
        self.num_records = 0
        self.num_bytes = 0
        self.num_left_out = 0

    def __enter__(self) -> Self:
        """Open the file and write the header.

        Raises:
            FileExistsError: without `overwrite`, when there is one.
            RefusedOutputError: when it is no regular file: a capture grows, and is cut off before it begins.
            OSError: when it cannot be written.
        """
        output_files.check(self._path)
        self._file = self._path.open(self._mode)  # type: ignore[assignment] # a binary mode
        self._write(layout.PREAMBLE)
        self._write_frame(layout.HEADER, msgspec.json.encode(self._header))
        self._opened.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file: complete without an error, otherwise with the records so far."""
        try:
            if kind is None:
                self.finish()
            elif not issubclass(kind, OSError):
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def write_record(self, record: Record) -> None:
        """Append a record; a record that does not fit is left out and counted.

        Raises:
            ValueError: when its stream is not in the header, or its sequence is not after the stream's last one.
            OSError: when the file cannot be written.
        """
        if (index := self._streams.get(record.stream)) is None:
            raise ValueError(f"stream {record.stream!r} is not in the header, which has {', '.join(self._streams)}")
        known = self._ranges.get(record.stream)
        if known is not None and record.sequence <= known.last_sequence:
            raise ValueError(f"{record.stream} {record.sequence} comes after {known.last_sequence}: not in order")
        if not fits(record):
            self.num_left_out += 1
            return
        self._ranges[record.stream] = StreamRange(
            first_sequence=known.first_sequence if known else record.sequence,
            last_sequence=record.sequence,
            num_records=known.num_records + 1 if known else 1,
        )
        self._block += layout.pack(record, index)
        self.num_records += 1
        if len(self._block) >= layout.BLOCK_BYTES:
            self._close_block()

    def flush(self) -> None:
        """Pass all records so far to the system: a reader sees them even if this process is killed."""
        self._close_block()
        self._opened.flush()

    def finish(self, reason: EndReason = "ended") -> CaptureEnd:
        """Write the end; no record can follow it. A second call changes nothing."""
        end = CaptureEnd(
            reason=reason, num_records=self.num_records, ranges=self._ranges, num_left_out=self.num_left_out
        )
        if not self._is_finished:
            self._close_block()
            self._write_frame(layout.END, msgspec.json.encode(end))
            self._opened.flush()
            os.fsync(self._opened.fileno())
            self._is_finished = True
        return end

    def _close_block(self) -> None:
        if self._block and not self._is_finished:
            self._write_frame(layout.BLOCK, layout.compress(self._block))
            self._block.clear()

    def _write_frame(self, kind: bytes, body: bytes) -> None:
        if len(body) > layout.MAX_BODY_BYTES[kind]:
            raise ValueError(f"a frame of {len(body)} bytes is over the limit of {layout.MAX_BODY_BYTES[kind]}")
        frame = layout.FRAME.pack(layout.MARKER, kind, self._num_frames, len(body)) + body
        digest = hashlib.sha256(self._seed + frame).digest()
        if kind == layout.HEADER:
            self._seed = digest
        self._write(frame + digest)
        self._num_frames += 1

    def _write(self, data: bytes) -> None:
        self._opened.write(data)
        self.num_bytes += len(data)

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None, "used within its context"
        return self._file
