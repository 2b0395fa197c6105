"""Baselines that decide how gradients travel: the published rules for a sync period or a codec, one module each.

In: what is known about one job at one closed window, as every policy. Out: the job's own sizes, and an exchange. They
hold the batch, so that what they gain is the exchange's; with option `track` the training processes divide it.

You may add a rule. What must stay: what a job does not permit is not decided, and nothing is decided of what was not
measured.
"""
