"""Steering: when an allocation is adopted, by all ranks on the same step or by none.

In: actions from the bus (in global rank 0), compute times of every step. Out: entries of the schedule, rows and reports
at the end of a window, receipts. `offers` accepts or refuses an action, `collectives` are the only messages between the
ranks, `tracking` divides a global batch by measured speed, `steering` ties them to step numbers.

You may change what is refused or how speeds are filtered. What must stay: whether a collective is due depends on the
step's number only, and nothing here waits for the bus.
"""
