"""Learned: policies that are files, evaluated in numpy; nothing here imports torch.

In: an observation and a policy file. Out: a decision. `inputs` makes the state free of scale, `actions` says what a
network's numbered choices mean, `forward` evaluates it, `policy` is the policy, `policy_file` the format and the files
that come with the package, `policy_store` the bucket on the bus, `policy_source` chooses.

You may add an input or a set of actions: a file selects both by name.
"""
