"""Rates of the ranks' links, from how fast ranks sent to each other; and times of owners with shares. Pure.

A rank that sends to another at some rate has a link at least as fast, and so has the other: a rank's link is taken to
be as fast as the fastest of these. Around a ring every rank sends to the next one, so that a slow link is told from
its neighbours' wherever no two slow ones have a single rank between them; else that rank is taken for a slow one too,
and less is expected of shares than they would bring.
"""

from collections.abc import Sequence

import numpy as np

from dynamix.schemas.messages import Job
from dynamix.schemas.owner_shares import balanced_shares, ring_time, shared_time

from .observation import Array32, Array64, column

LEAST_RANKS, MOST_RANKS = 3, 64
"""Two ranks have nothing to gain; a sum at owners sends N - 1 messages for each chunk, and more were never measured."""
PIPELINE = 1.2
"""Time of a sum at owners over what its bytes take, itself over that of a ring: four ranks, 1.92 MB in 8 chunks, one
link of four at a half to a fifth of the others, and all alike (1.21, 1.20, 1.23, 1.14)."""
PARTS = 1000
"""Shares are whole numbers of so many parts, and the same on all machines."""


def can_share(job: Job) -> bool:
    """Whether owners with shares can be of use, once the rates of all links are known."""
    return job.supports_exchange and LEAST_RANKS <= job.world_size <= MOST_RANKS


def link_rates(obs_WF: Array32) -> Array64 | None:
    """Bytes per second of each rank's link in a window; `None` if one is unknown.

    A rank that sends to others of its own node only knows none: so each rank must have a node, and a link, of its own.
    """
    sent, peers = column(obs_WF, "link_bytes_per_s"), column(obs_WF, "link_peer")
    known = np.isfinite(sent) & (sent > 0) & (peers >= 0) & (peers < len(sent))
    if not known.all():
        return None
    rates = sent.copy()
    np.maximum.at(rates, peers.astype(np.int64), sent)
    return rates


def shares_of(rates: Sequence[float]) -> tuple[float, ...]:
    """The best shares for links of such rates, in whole parts."""
    return tuple(float(round(PARTS * share)) for share in balanced_shares(rates))


def share_of_ring_time(rates: Sequence[float]) -> float:
    """Time of a sum at owners with the best shares over that of a ring."""
    return PIPELINE * shared_time(rates, shares_of(rates)) / ring_time(rates)


def slowest_in_words(rates: Sequence[float]) -> str:
    """Reason for choosing shares."""
    if not rates:
        return "gradients travel over owners, as before the start"
    slowest, fastest = min(rates), max(rates)
    return (
        f"the link of rank {rates.index(slowest)} carries {slowest / 1e6:.3g} MB/s, others up to {fastest / 1e6:.3g}: "
        "owners with shares relieve it"
    )
