"""Deciding: recorded states of a job in, one action per window out, each window once.

In: states from FEED in the order in which the broker stored them, the job's specification, a policy. Out: actions in
ACTIONS, chained by hashes and written under compare-and-set. `fold` closes windows and asks the policy (pure),
`job_log` checks what is stored and joins the fold to the bus, `signatures` recognises failures, `profiles` makes of a
run what the next one of its family begins with.

You may change when a window closes, and then also the reference fold of the tests. What must stay: a decision is a
function of recorded messages, without a clock or global random state.
"""
