"""Deciding: recorded states of a job in, one action per window out, each window once.

In: states from FEED in the order in which the broker stored them, the job's specification, a policy. Out: actions in
ACTIONS, chained by hashes and written under compare-and-set. `fold` closes windows and asks the policy (pure),
`job_log` checks what is stored, joins the fold to the bus and keeps the profiles of job families, `signatures`
recognises failures.

You may change when a window closes, and then also the reference fold of the tests. What must stay: a decision is a
function of recorded messages, without a clock or global random state.
"""
