"""The eBPF probe: bytes received, acknowledged and retransmitted per TCP socket of the ranks, counted in the kernel.

In come a control group and the cookies of sockets that a report names; out goes each rank's traffic in a window, or
the reason why it is not known. `probe` loads, attaches and reads; `traffic` (pure) turns readings into windows. The C
program and `program` must be changed together. Nothing here knows the bus.
"""
