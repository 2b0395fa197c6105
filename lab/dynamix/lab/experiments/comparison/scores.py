"""Statistics of an evaluation: times to a target, paired ratios, their geometric mean and its interval.

Arrays have `P` policy seeds x `C` scenarios x `S` scenario seeds, NaN where a run is missing (`outcomes`).

The interval is a percentile bootstrap over policy seeds AND scenario seeds: each is drawn with
replacement, independently (the pigeonhole bootstrap: Owen, Annals of Applied Statistics 1, 2007); scenarios are fixed.
A second one, where there are several families, also draws families, and scenarios within each: it is about clusters
like these, the first about these clusters.
One draw of seeds serves all scenarios, since a seed is the same model and order of data in all of them. With a dozen
seeds plain percentiles are too narrow, so they are expanded as Hesterberg proposes (American Statistician 69, 2015),
with the number of draws that Satterthwaite's formula gives for the sources together. `scipy.stats.bootstrap` has
neither the crossed axes nor the expansion.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, stdtrit  # scipy.stats.norm.cdf and scipy.stats.t.ppf, without a second of import

Array64 = npt.NDArray[np.float64]

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
_RESAMPLE_SEED = 20_240_601
"""Fixed: the same results give the same interval, always."""


class RatioInterval(msgspec.Struct, frozen=True):
    """Geometric mean of paired ratios of time to target, with its 95 % interval; below 1 is faster."""

    ratio: float
    low: float | None
    """`None` where there is only one seed: the spread is unknown."""
    high: float | None
    family_low: float | None = None
    """95 % interval with families as a sample of those there could be; `None` with less than two families or seeds."""
    family_high: float | None = None


class MeanInterval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval."""

    value: float
    low: float | None
    """`None` where there is only one seed: the spread is unknown."""
    high: float | None


def relative_spread(times_PCS: Array64) -> float | None:
    """Return standard deviation over mean of the times in a scenario, averaged; `None` below two runs each."""
    known_C = (scenario[~np.isnan(scenario)] for scenario in np.moveaxis(times_PCS, 1, 0))
    spreads = [np.std(times, ddof=1) / times.mean() for times in known_C if times.size > 1]
    return float(np.mean(spreads)) if spreads else None


def paired_ratio(
    times_PCS: Array64, base_CS: Array64, *, families: Sequence[str] | None = None
) -> RatioInterval | None:
    """Return the geometric mean ratio of a row's times to a baseline's, paired by scenario and seed.

    Args:
        times_PCS: the row's counted times, NaN where a run is missing.
        base_CS: the baseline's counted times.
        families: the family of each scenario: each family counts alike, and so does each scenario within it. When not
            given, all scenarios are one family.

    Returns:
        `None` when no pair is complete.
    """
    logs_PCS = np.log(times_PCS) - np.log(base_CS)[None]
    known_P, known_C, known_S = (~np.isnan(logs_PCS).all(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    if not known_S.any():
        return None
    logs_PCS = logs_PCS[np.ix_(known_P, known_C, known_S)]
    all_families = [""] * len(known_C) if families is None else families
    weights = family_weights(list(all_families))[known_C]
    own_families = [family for family, is_known in zip(all_families, known_C.tolist(), strict=True) if is_known]
    num_P, _, num_S = logs_PCS.shape
    (center,) = _means(logs_PCS, weights[None], np.ones((1, num_P)), np.ones((1, num_S)))
    low, high = _interval(logs_PCS, weights)
    family_low, family_high = _family_interval(logs_PCS, own_families)
    return RatioInterval(float(np.exp(center)), low, high, family_low, family_high)


def crossed_mean(values_PCS: Array64) -> MeanInterval | None:
    """Return the mean with Student's interval for policy seeds crossed with scenario seeds; `None` without a value.

    Runs that share a policy or a seed are not independent: the variance is that of the means per policy seed plus that
    of the means per scenario seed, its degrees of freedom are Satterthwaite's. Scenarios are fixed.
    """
    known = ~np.isnan(values_PCS)
    if not known.any():
        return None
    known_P, known_C, known_S = (known.any(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    values_PCS = values_PCS[np.ix_(known_P, known_C, known_S)]
    mean = float(np.nanmean(np.nanmean(values_PCS, axis=(0, 2))))
    if values_PCS.shape[2] == 1:
        return MeanInterval(mean, None, None)
    variance = sum(variance for variance, _ in _variances(values_PCS))
    half = float(stdtrit(_effective_draws(_variances(values_PCS)) - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return MeanInterval(mean, mean - half, mean + half)


def family_weights(families: list[str]) -> Array64:
    """Return weights of scenarios, given their families, by which all families count equally; they sum to 1."""
    counts = {family: families.count(family) for family in families}
    return np.array([1 / (len(counts) * counts[family]) for family in families])


def expanded_tail(num_draws: float, confidence: float = CONFIDENCE) -> float:
    """Return the share of resamples to leave out at each end: below (1 - confidence) / 2 for few draws.

    Phi(-sqrt(n / (n - 1)) t(n - 1)), Hesterberg's equation for the expanded percentile interval.
    """
    return float(ndtr(-math.sqrt(num_draws / (num_draws - 1)) * stdtrit(num_draws - 1, (1 + confidence) / 2)))


def _interval(logs_PCS: Array64, weights_C: Array64) -> tuple[float, float] | tuple[None, None]:
    num_P, _, num_S = logs_PCS.shape
    if num_S == 1:
        return None, None
    generator = np.random.default_rng(_RESAMPLE_SEED)
    counts_BP = _multiplicities(generator, num_P)
    counts_BS = _multiplicities(generator, num_S)
    means = _means(logs_PCS, weights_C[None], counts_BP, counts_BS)
    return _quantiles(means, _effective_draws(_variances(logs_PCS)))


def _family_interval(logs_PCS: Array64, families: Sequence[str]) -> tuple[float, float] | tuple[None, None]:
    """Return the interval with families drawn, too, and scenarios within each family, as often as there are."""
    num_P, _, num_S = logs_PCS.shape
    names = sorted(set(families))
    if num_S == 1 or len(names) == 1:
        return None, None
    generator = np.random.default_rng(_RESAMPLE_SEED)
    counts_BP = _multiplicities(generator, num_P)
    counts_BS = _multiplicities(generator, num_S)
    weights_BC = np.zeros((NUM_RESAMPLES, len(families)))
    counts_BF = _multiplicities(generator, len(names))
    for name, counts_B in zip(names, counts_BF.T, strict=True):
        own_C = [place for place, family in enumerate(families) if family == name]
        weights_BC[:, own_C] = counts_B[:, None] * _multiplicities(generator, len(own_C)) / len(own_C)
    means = _means(logs_PCS, weights_BC, counts_BP, counts_BS)
    return _quantiles(means, _effective_draws([*_variances(logs_PCS), _family_variance(logs_PCS, families)]))


def _quantiles(means_B: Array64, num_draws: float) -> tuple[float, float]:
    tail = expanded_tail(num_draws)
    low, high = np.nanquantile(means_B, (tail, 1 - tail))
    return float(np.exp(low)), float(np.exp(high))


def _effective_draws(pairs: Sequence[tuple[float, int]]) -> float:
    """Return the number of draws behind a mean's variance, by Satterthwaite's formula over its sources."""
    total = sum(variance for variance, _ in pairs)
    if total == 0:  # no spread at all: any tail gives the same interval
        return float(max(size for _, size in pairs))
    degrees = total**2 / sum(variance**2 / (size - 1) for variance, size in pairs)
    return 1 + degrees


def _family_variance(logs_PCS: Array64, families: Sequence[str]) -> tuple[float, int]:
    """Return the variance of the mean by families, with their number."""
    means_C = np.nanmean(logs_PCS, axis=(0, 2))
    means = [
        np.mean([mean for mean, own in zip(means_C, families, strict=True) if own == name]) for name in set(families)
    ]
    return float(np.var(means, ddof=1)) / len(means), len(means)


def _variances(values_PCS: Array64) -> list[tuple[float, int]]:
    """Return the variances of the mean by policy seeds and by scenario seeds, each with the number of seeds."""
    return [
        (float(np.var(means, ddof=1)) / means.size, means.size)
        for means in (_marginal_means(values_PCS, keep=0), _marginal_means(values_PCS, keep=2))
        if means.size > 1
    ]


def _marginal_means(logs_PCS: Array64, *, keep: int) -> Array64:
    """Return means over all axes but one, after subtracting the mean of each scenario."""
    centred = logs_PCS - np.nanmean(logs_PCS, axis=(0, 2), keepdims=True)
    others = tuple(axis for axis in range(3) if axis != keep)
    means: Array64 = np.nanmean(centred, axis=others)
    return means


def _multiplicities(generator: np.random.Generator, number: int) -> Array64:
    """Return how often each of `number` seeds was drawn, per resample."""
    return generator.multinomial(number, np.full(number, 1 / number), size=NUM_RESAMPLES).astype(np.float64)


def _means(logs_PCS: Array64, weights_BC: Array64, counts_BP: Array64, counts_BS: Array64) -> Array64:
    """Return per resample the weighted mean over scenarios of their mean log ratios; NaN without a run.

    One row of weights serves all resamples.
    """
    known = ~np.isnan(logs_PCS)
    sums_BC = np.einsum("bp,pcs,bs->bc", counts_BP, np.where(known, logs_PCS, 0.0), counts_BS, optimize=True)
    runs_BC = np.einsum("bp,pcs,bs->bc", counts_BP, known.astype(np.float64), counts_BS, optimize=True)
    weights_BC = np.where(runs_BC > 0, weights_BC, 0.0)
    means_BC = np.divide(sums_BC, runs_BC, out=np.zeros_like(sums_BC), where=runs_BC > 0)
    total_B = weights_BC.sum(axis=1)
    weighted_B = (weights_BC * means_BC).sum(axis=1)
    means_B: Array64 = np.divide(weighted_B, total_B, out=np.full_like(total_B, np.nan), where=total_B > 0)
    return means_B
