"""Models with their data and loss, written once for real training, the virtual cluster and the benchmarks."""

from .catalog import WORKLOADS, workload_named
from .optimizers import OPTIMIZERS, family_of_name, make_optimizer
from .workload import Data, Part, Workload

__all__ = [
    "OPTIMIZERS",
    "WORKLOADS",
    "Data",
    "Part",
    "Workload",
    "family_of_name",
    "make_optimizer",
    "workload_named",
]
