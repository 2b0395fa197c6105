"""Comparison: policies on the same scenarios and seeds, judged by the time to a held-out target.

In: a suite of scenarios, rows (a policy with its settings), seeds. Out: a ledger of runs and a verdict with paired
ratios and their intervals. `rows` reads rows and tuned settings, `runs` plans and runs the episodes and keeps the
ledger, `verdict` has the statistics, `figure` their picture, `tuning` gives every baseline the same budget.
Everything that determines an outcome belongs in `RunTask.key`, or stored runs of old code are mixed with new ones.
"""

from dynamix.runtime.output_files import FileKind

HEADER = b'{"dynamix":"results of runs, a line each","format":1}\n'
LEDGER = FileKind("a file of results", lambda head: head.startswith(HEADER) or HEADER.startswith(head))
"""A ledger begins with the header, or with a part of it when a kill cut it off."""
