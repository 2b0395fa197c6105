"""Captures: what the broker stored of one job, in a file with checksums that is read block by block.

with CaptureWriter(path, header) as writer:   # records in, in the order in which the broker stored them
    writer.write_record(record)
    writer.finish("ended")

for record in records(path):                  # checked as they are read; CaptureError names block and byte
    ...

`file` has the byte format (docs/replay.md); a change of it needs a new `VERSION`.
"""

from .file import CaptureReader, CaptureWriter, first_generation, read_header, records
from .fingerprint import Fingerprint, differences, fingerprint
from .record import (
    CaptureEnd,
    CaptureError,
    CaptureHeader,
    CutOffError,
    EndReason,
    Record,
    RecordMerge,
    StreamRange,
    WindowKey,
    fits,
)

__all__ = [
    "CaptureEnd",
    "CaptureError",
    "CaptureHeader",
    "CaptureReader",
    "CaptureWriter",
    "CutOffError",
    "EndReason",
    "Fingerprint",
    "Record",
    "RecordMerge",
    "StreamRange",
    "WindowKey",
    "differences",
    "fingerprint",
    "first_generation",
    "fits",
    "read_header",
    "records",
]
