"""Learned: policies that are files, evaluated in numpy; nothing here imports torch.

In: an observation and a policy file. Out: a decision. `policy_file` is the file and its network: weights and what they
mean; `policy` decides with it: features, network, action; `policy_store` keeps versions on the bus and chooses among
them.
"""
