"""One client sends as much as it can: how long does an honest job wait for its decisions?

`senders` make the floods, `measurement` runs one beside a steady job with the real services. `__main__` runs them all
and makes the table of docs/floods.md.
In: kinds of flood and their size. Out: docs/floods.json, the table, targets.
"""
