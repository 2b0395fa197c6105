"""Episodes: one virtual job under one policy, through the services' own pure functions.

In: a scenario, a seed, a policy. Out: an `Episode` with every window, reward and evaluation. `episode` joins the
simulator to the functions that the services call; `pool` runs episodes in worker processes; `suite` groups scenario
files by family; `provenance` names the code and libraries that numbers depend on. Comparison and learning are built on
this folder and never imported by it; nothing here may depend on the number of workers.
"""
