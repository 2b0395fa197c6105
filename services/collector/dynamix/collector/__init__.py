"""The collector, one per node: reports in, metric windows and states out, with what the kernel knows of the ranks.

`agent` (pure) is the node's agent where no centre decides: a report in, a trace out.

`service` consumes and publishes; `observation` decides which processes are read, `procfs` reads them, `ebpf` counts
their sockets' traffic, `window` (pure) chooses where network metrics come from and puts a metric window together.
To add a measured feature: its source, the trainer's rows, `schemas.messages`, `window` and `schemas.features`.
Nothing here may slow training or trust a report's pids.
"""
