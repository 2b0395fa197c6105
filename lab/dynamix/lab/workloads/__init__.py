"""Workloads: models with their data and loss, shared by real training, the virtual cluster and the benchmarks.

In: a name such as `fashion-14-mlp`, and a directory with the data set. Out: a `Workload` (model, data, loss, accuracy).
Add a workload in `catalog`; its outputs must not depend on other samples of the batch (no BatchNorm), or weighted
gradients are no longer those of one big batch. `datasets` reads published files and never downloads; `generated` makes
data from a seed.
"""

from .catalog import OPTIMIZERS, WORKLOADS, Data, Part, Workload, make_optimizer, workload_named

__all__ = ["OPTIMIZERS", "WORKLOADS", "Data", "Part", "Workload", "make_optimizer", "workload_named"]
