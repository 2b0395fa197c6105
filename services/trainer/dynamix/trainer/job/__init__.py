"""Job: who this job is, what it was told, and the messages that say so.

In: the arguments of `attach` and what the ranks told each other. Out: checked options, the job's id, generation and
places, specifications, reports and receipts. `options` checks, `identity` names, `memory_caps` keeps upper bounds over
restarts, `reporting` builds messages, `shutdown` words the reason of an end.

You may add an option: a field of `JobOptions`, its check, and `fingerprint` if all ranks must agree on it.
"""
