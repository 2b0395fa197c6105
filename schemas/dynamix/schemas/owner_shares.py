"""Shares of a gradient that each rank or server sums up: the best ones for links of known rates, and their times. Pure.

Every rank sends M bytes in any case, however little it owns, so a sum takes at least T = M / min B. A rank that owns
the share s sends, and receives, M (1 + s (N - 2)), a server M N s, both directions at once. A ring has every rank send
2 (N - 1) / N M over its link, at the pace of the slowest.
"""

from collections.abc import Sequence

_HALVINGS = 60


def balanced_shares(rank_rates: Sequence[float], server_rates: Sequence[float] = ()) -> tuple[float, ...]:
    """Shares by rank, then by server, with which all links are busy equally long, as far as that can be.

    They are those of the smallest T in which all of M is owned:

        sum_i max(0, (T B_i / M - 1) / (N - 2)) + sum_j T B_j / (N M) >= 1

    Args:
        rank_rates: B_i, of each rank's link, in any unit.
        server_rates: B_j, of each server's link, in the same unit.

    Raises:
        ValueError: for a rate that is not above 0, or fewer than 2 ranks.
    """
    num_ranks = len(rank_rates)
    if num_ranks < 2 or not all(rate > 0 for rate in (*rank_rates, *server_rates)):
        raise ValueError(f"rates {[*rank_rates, *server_rates]} of {num_ranks} ranks and the servers: each above 0")
    others = max(num_ranks - 2, 1e-9)  # with two ranks a rank sends no more for what it owns

    def owned(time: float) -> list[float]:
        ranks = [max(0.0, time * rate - 1) / others for rate in rank_rates]
        return [*ranks, *(time * rate / num_ranks for rate in server_rates)]

    low = 1 / min(rank_rates)
    high = 2 * num_ranks * low
    if sum(owned(low)) < 1:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(owned(middle)) >= 1 else (middle, high)
    else:
        high = low
    shares = owned(high)
    return tuple(share / sum(shares) for share in shares)


def shared_time(rates: Sequence[float], shares: Sequence[float]) -> float:
    """Time to sum M bytes at owners, in units of M over that of the rates; without servers."""
    total, others = sum(shares), len(rates) - 2
    return max((1 + share / total * others) / rate for rate, share in zip(rates, shares, strict=True))


def ring_time(rates: Sequence[float]) -> float:
    """The same of an all-reduce around a ring."""
    return 2 * (len(rates) - 1) / len(rates) / min(rates)
