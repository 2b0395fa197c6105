"""A real training job across several hosts on this machine, with slow links and slow processors.

`plan` says what is slow and how the job is steered, and reads it from the command line. `job` is one rank,
`runner` trains one job after the other on the same hosts and keeps what came over the bus, which `summary` turns into
medians. `display` shows a run; `__main__` compares policies, `table` conditions with actions, `target` times to a
held-out accuracy. In: hosts (`bench.hosts`), rates, shares of a processor, policies. Out: `ClusterResult`s.
"""
