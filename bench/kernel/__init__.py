"""What the kernel probe costs: nanoseconds a packet, share of the machine, memory, and what shows from outside.

`traffic` is over loopback, `training` a gloo job, both in the measured group; `programs` makes the control groups and
attaches the probe's programs as the collector does. `arms` measures run times and what shows from outside, `collector`
memory and readings, `display` shows it all, `__main__` judges.
In: root, a mounted cgroup version 2 without other programs. Out: the report of docs/overhead.md, The kernel probe.
"""
