"""One client sends as much as it can: how long does an honest job wait for its decisions?

`senders` make the floods, `measurement` runs one beside steady jobs with the real services; `deployment` is the broker
of deploy/ with a key for each user. `__main__` runs them all and makes the table of docs/floods.md.
`restart`, a program of its own, restarts the arbitrator beside crowds of jobs.
In: kinds of flood and their size. Out: docs/floods.json, the table, targets.
"""
