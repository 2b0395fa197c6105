"""Readings of /proc: processes and the machine between two windows.

`proc` reads and parses files, `intervals` keeps the previous reading of each cumulative counter, `readings` turns two
readings into the metrics of a window. In come pids that were checked; out go metrics, `None` where not known. To add a
counter: its parser in `proc`, its difference in `readings`, its field in `schemas.messages`.
"""
