"""Episodes: one virtual job under one policy, through the services' own pure functions.

In: a scenario, a seed, a policy. Out: an `Episode` with every window, reward and evaluation. `suite` reads scenario
files, `policy_files` finds learned policies.
"""
