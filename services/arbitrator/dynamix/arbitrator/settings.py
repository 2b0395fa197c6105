"""Settings of the arbitrator: `DYNAMIX_ARBITRATOR_<FIELD>` or `--field`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ArbitratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the process; each job's own specification says by which policy to decide."""

    max_jobs: Annotated[int, Meta(ge=1)] = 10_000
    """Jobs held in memory at once; the least recently used are dropped first, and read again when needed."""
    policy_cache: str = ""
    """Directory that keeps the learned policies that were read, by digest; empty: none. With it a restart can continue
    with a version that the bus has lost."""
