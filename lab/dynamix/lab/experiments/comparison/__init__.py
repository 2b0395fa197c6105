"""Comparison: policies on the same scenarios and seeds, judged by the time to a held-out target.

In: a suite of scenarios, contenders as they are spelled on the command line, seeds. Out: a ledger of runs and a verdict
with paired ratios and their intervals. `contenders` parses rows, `baselines` are policies of the laboratory alone,
`evaluation` plans the cells and runs them, `runs` is the ledger, `outcomes` holds what it has as arrays, `scores` their
statistics, `verdict` the result, `figure` its picture; `tuning` gives every baseline the same budget, `tuned` is the
file of its choices.
Everything that determines an outcome belongs into `RunTask.key`, or stored runs of old code are mixed with new ones.
"""
