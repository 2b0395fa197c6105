"""Policies: all that an author of a policy needs, and the policies that come with the arbitrator.

In: what is known about one job at one closed window. Out: a decision. `policy` is the protocol, `options` what a job
may set, `carry` what a policy remembers, `model` predicts step times and the noise scale, `sizing` turns a global batch
into sizes per rank. The other modules are one policy each, whose words make docs/policies.md. `registry` finds a policy
by name, also those that other packages register.

You may add a policy: one module and one line in `registry`. What must stay: the same arguments give the same decision,
without a clock or global random state; a change of decisions is a new `version`.
"""
