"""Memory of the device that this rank trains on."""

from typing import NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Memory of the whole device, other processes included."""

    used_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory of a GPU; `None` on the CPU, where the collector sees the process's own."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total - free, total)
