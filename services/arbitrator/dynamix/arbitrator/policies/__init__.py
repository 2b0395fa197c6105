"""Policies: all that an author of a policy needs, and the policies that come with the arbitrator.

In: what is known about one job at one closed window. Out: a decision. `policy` is the interface and what an author
needs, `step_time` predicts times and turns a global batch into sizes per rank, `exchange` chooses how gradients are
exchanged. The docstrings of the classes in `rule` and `baselines` make docs/policies.md. `registry` finds a policy by
name, also those that other packages register.

You may add a policy: a class and one line in `registry`. What must stay: the same arguments give the same decision,
without a clock or global random state; a change of decisions is a new `version`.
"""
