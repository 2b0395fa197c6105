"""What can be wrong with a capture, and up to where it is good."""

from pathlib import Path


class CaptureError(ValueError):
    """A file that is no capture, or a damaged one.

    Attributes:
        block: index of the block that cannot be used: 0 is the header, -1 where there is not even that.
        offset: the byte at which that block begins.
        num_records: records before it; all of them are good.
    """

    def __init__(self, path: Path, reason: str, *, block: int = -1, offset: int = 0, num_records: int = 0) -> None:
        place = f" at block {block} (byte {offset}): " if block >= 0 else ": "
        good = f"; the {num_records} records before it are good" if block > 0 else ""
        super().__init__(f"{path}{place}{reason}{good}")
        self.block = block
        self.offset = offset
        self.num_records = num_records


class CutOffError(CaptureError):
    """A capture without its end: the writer was killed, or the file was cut. What was read of it is good."""
