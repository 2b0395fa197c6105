"""The largest local batch size that fits each rank's memory, from torch's counters in the first steps: no trial step.

What a step needs above parameters and the optimizer's state is taken to grow in proportion to its samples. Gradients
and workspaces do not, so that the size found is too small rather than too large. Meanwhile no rank gets more samples.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

NUM_STEPS = 3
"""Steps that are looked at. In the first one, whose peak does not count, kernels are tried out."""
SHARE = 0.9
"""Share of the memory that may be used: allocators leave gaps, and later samples may be longer."""
MOST_TIMES = 64
"""Largest bound over the script's largest size."""


class Memory(NamedTuple):
    """Bytes of a device, which ranks may share. As found, any size takes `allocated`, and `num_samples` the peak."""

    device: str
    allocated: int
    peak: int
    reserved: int
    free: int
    num_samples: int = 0


def read(device: torch.device, *, resets: bool = False) -> Memory:
    """The counters of a GPU, with a new peak afterwards if it `resets`; ValueError for other devices."""
    if device.type != "cuda":
        raise ValueError(f'max_local_batch_size="auto" measures GPUs, and this model is on {device}: pass a number')
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # not in torch 2.4
        free = min(free, int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved)
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    if resets:
        torch.cuda.reset_peak_memory_stats(device)
    return Memory(str(torch.cuda.get_device_properties(device).uuid), allocated, peak, reserved, free)


class MemorySearch:
    """Looks at the memory of one rank in its first steps."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._static = device, read(device).allocated
        self._num_steps = self._num_samples = self._peak = 0
        self._before_updates = [0] * NUM_STEPS

    def before_update(self) -> None:
        """Look before each update: behind it scripts may reset the peak."""
        memory = read(self._device)
        self._before_updates[self._num_steps], self._peak = memory.allocated, max(self._peak, memory.peak)

    def end_step(self, num_samples: int) -> bool:
        """End a step of so many samples; whether it was the last."""
        self._num_steps += 1
        self._peak = max(self._peak, read(self._device, resets=self._num_steps == 1).peak)
        self._num_samples = max(self._num_samples, num_samples)
        if self._num_steps == 1:
            self._peak, self._num_samples = 0, 1
        return self._num_steps == NUM_STEPS

    def found(self) -> Memory:
        """The memory as the steps needed it. The second update finds the optimizer state that the first one made."""
        now, (first, second, _) = read(self._device), self._before_updates
        static = self._static + (max(second - first, 0) if first else 0)  # 0: a scaler skipped the update
        static = min(static, now.allocated)  # what the script has freed since it attached
        return now._replace(allocated=static, peak=self._peak, num_samples=self._num_samples)


def largest_sizes(found: Sequence[Memory], begun: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """The largest size of each rank, between the one that it has `begun` with and its cap."""
    sharers, sizes = Counter(each.device for each in found), []
    for each, least, cap in zip(found, begun, caps, strict=True):
        limit, used = SHARE * (each.reserved + each.free // sharers[each.device]), each.peak - each.allocated
        sizes.append(min(max(int(each.num_samples * (limit - each.allocated) / used) if used > 0 else 0, least), cap))
    return tuple(sizes)
