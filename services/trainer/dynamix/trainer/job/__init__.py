"""Job: identity, options and messages of this job.

In: the arguments of `attach` and what the ranks exchanged at the rendezvous. Out: checked options, the job's id,
generation and places, specifications, reports and receipts. `options` checks, `identity` names, `memory_caps` keeps
upper bounds over restarts, `reporting` builds messages and words the reason of an end.

You may add an option: a field of `JobOptions`, its check, and `fingerprint` if all ranks must agree on it.
"""
