"""Progress of a step by global batch size. Pure.

`rule` weighs it against its model of the step's time (arbitrator), the agents of `stigmergy` against what they see of
it (collector): both by the same formula, with the same bound.
"""

import math

import numpy as np
import numpy.typing as npt

Array64 = npt.NDArray[np.float64]

MOST_NOISE_SCALES = 16.0
"""Above so many times B_noise a step is worth no more. Without a bound 1,024 ranks behind a ring of 0.4 s per step went
to 372,469 samples at a noise scale of 60, and to a learning rate of 2.7; 0.8 trained, from 1.1 on the loss diverged."""


def progress(
    global_batch_sizes: Array64, noise_scale: float, rate_exponent: float = 0.0, most: float = math.inf
) -> Array64:
    """Progress of a step of B samples, up to a constant: B^rate_exponent B / (B + B_noise); constant above `most`.

    With exponent 0 that is McCandlish et al. (arXiv 1812.06162): the learning rate is the best one for each B. A rule
    that sets it in proportion to B^e instead makes a step of little noise worth as much more: the first factor. It has
    no bound of its own, unlike the learning rates that a training bears.
    """
    counted = np.minimum(global_batch_sizes, most)
    worth: Array64 = counted**rate_exponent * counted / (counted + noise_scale)
    return worth


def most_worthwhile(noise_scale: float, base_global_batch_size: int) -> float:
    """The global batch above which a step is worth no more.

    `base_global_batch_size` is that of the user's learning rate: early in a training B_noise alone is too small.
    """
    return MOST_NOISE_SCALES * max(noise_scale, base_global_batch_size)
