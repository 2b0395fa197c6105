"""Recording: a job's messages in one file, and a replay of them into the services.

- `capture`: the file. Records in, a checked file out, and back. `fingerprint`: the build that made it.
- `table`: a capture in, columns for pandas or Arrow out: `dynamix.recording.load("job.dxc").to_pandas()`.
- `replay`: a capture in, an outcome out; the functions of collector, reward service or arbitrator run over a capture.

Each uses only those above it. The views of results are in `dynamix.cli`.
"""

from .table import CaptureTable, load

__all__ = ["CaptureTable", "load"]
