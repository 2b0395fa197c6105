"""Comparison: policies on the same scenarios and seeds, judged by the time to a held-out target.

In: contenders and a suite. Out: a ledger of runs, paired ratios with intervals, a verdict. `pool` runs episodes in
processes, `runs` is the ledger, `scores` the statistics, `tuning` gives every baseline the same budget.
"""
