"""Captures: what the streams held of one job, in a file that says what it is, checks itself, and reads as a stream.

with CaptureWriter(path, header) as writer:   # records in, in the order in which the broker stored them
    writer.add(record)
    writer.finish("ended")

for record in records(path):                  # checked as they come; CaptureError names the place
    ...
"""

from .errors import CaptureError, CutOffError
from .fingerprint import Fingerprint, differences, fingerprint
from .merge import Merge
from .reader import CaptureReader, read_header, records
from .record import CaptureEnd, CaptureHeader, EndReason, Record, StreamRange, fits
from .writer import CaptureWriter

__all__ = [
    "CaptureEnd",
    "CaptureError",
    "CaptureHeader",
    "CaptureReader",
    "CaptureWriter",
    "CutOffError",
    "EndReason",
    "Fingerprint",
    "Merge",
    "Record",
    "StreamRange",
    "differences",
    "fingerprint",
    "fits",
    "read_header",
    "records",
]
