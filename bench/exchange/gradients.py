"""Gradients with rows of zeros: some are made per case, so that no exchange has the gradient of the one before it."""

import numpy as np
import torch
from bench.exchange.plan import Case, RankPlan
from torch import Tensor

from dynamix.trainer.exchange.codec import BucketPart, BucketView

NUM_GRADIENTS = 3
"""Made per case, and taken in turn."""
STD = 0.01


def make_gradients(case: Case, plan: RankPlan, rank: int) -> list[Tensor]:
    """A rank's gradients of a case, flat, float32: normal values in some of the rows."""
    return [_gradient(case, plan, rank, number) for number in range(NUM_GRADIENTS)]


def _gradient(case: Case, plan: RankPlan, rank: int, number: int) -> Tensor:
    mask_key = {"steady": [plan.seed], "identical": [plan.seed, number], "independent": [plan.seed, number, rank]}
    num_rows = plan.num_elements // case.width
    num_touched = max(1, round(case.density * num_rows))
    rows = np.random.default_rng(mask_key[case.mask]).permutation(num_rows)[:num_touched]
    drawn = np.random.default_rng([plan.seed, number, rank, 1])
    values = drawn.standard_normal((num_touched, case.width), dtype=np.float32) * np.float32(STD)
    flat = torch.zeros(num_rows, case.width)
    flat[torch.from_numpy(np.sort(rows))] = torch.from_numpy(values)
    return flat.flatten()


def buckets_of(flat: Tensor, width: int, num_buckets: int) -> list[BucketView]:
    """The gradient as buckets of about equal sizes, each with one table."""
    num_rows = len(flat) // width
    buckets, start = [], 0
    for number in range(num_buckets):
        stop = num_rows * (number + 1) // num_buckets * width
        shape = torch.Size(((stop - start) // width, width))
        part = BucketPart(f"table{number}", 0, stop - start, shape)
        buckets.append(BucketView(number, flat[start:stop], (part,)))
        start = stop
    return buckets


def sparse_of(flat: Tensor, width: int) -> Tensor:
    """The gradient as autograd makes it of `nn.Embedding(sparse=True)`: indices of rows, and the rows."""
    table = flat.view(-1, width)
    rows = (table != 0).any(1).nonzero().flatten()
    return torch.sparse_coo_tensor(rows[None], table[rows], table.shape, is_coalesced=True, check_invariants=False)
