"""What the kernel probe costs: nanoseconds a packet, share of the machine, memory, and what shows from outside.

`groups` makes the control groups, `endpoints` and `traffic` the loopback traffic, `training` a gloo job, all in the
measured group; `programs` attaches the probe's programs as the collector does. `run_times`, `arms`, `memory` and
`reading` are the four parts of the measurement, `tables` and `figure` show them, `__main__` judges them.
In: root, a mounted cgroup version 2 without other programs. Out: the report of docs/overhead.md, The kernel probe.
"""
