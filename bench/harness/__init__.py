"""What all benchmarks share: how arms are repeated and compared, how figures are judged, shown and written.

A benchmark says what it measures, its arms and its targets. It runs the arms in `Rounds`, which time them in random
order, mirror every second round and compare the timings of a round with each other; it holds figures against `Target`s
and hands a `BenchmarkReport` to `run_benchmark`, which prints table and targets, writes JSON with versions and load,
draws the figure and returns the exit code: 0, 1 when a target is missed, 2 when it cannot run.

In: command line arguments, functions that do the work once. Out: tables, JSON, figures, the exit code. Nothing here
knows what is measured; a new form of output or a new statistic belongs here, a new measurement does not.
"""
