"""Settings of the arbitrator: `DYNAMIX_ARBITRATOR_<FIELD>` or `--field`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ArbitratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds; what to decide, and by which policy, is in each job's own specification."""

    max_jobs: Annotated[int, Meta(ge=1)] = 10_000
    """Jobs held in memory at once; those not heard of for longest are forgotten first, and read again when needed."""
    policy_cache: str = ""
    """Directory that keeps the learned policies that were read, by digest; none when empty. With it a restart can go on
    with a version that the bus has lost."""
