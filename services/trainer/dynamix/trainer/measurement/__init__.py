"""Measurement: what this rank observes of itself in a window, as one row of numbers.

In: the moments of each step, losses, squared norms, the process's sockets and memory. Out: a `Row` of float64, which
all ranks gather at the end of a window, and the message rows made of it. `clock` divides a step into data, compute,
sync and update, `connections` and `sockets` read TCP_INFO and socket cookies, `process` identifies this process to a
collector, `meter` sums over the steps, reads the device and calls the rest.

You may add a column: a field of `Row`, its value in `make_row`, its field in `RankRow`. What is not known is NaN.
"""
