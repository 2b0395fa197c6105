"""A broker of three servers that loses one: what is lost, and how long a running job has no decisions.

`servers` are three real nats-servers on loopback, `partition` the same on hosts of network namespaces; a steady job
with the real services runs on them, and a `bystander` counts what they acknowledge, as does a client on the side of a
server that is cut off (`minority`); `trial` does something to a server and judges. `__main__` repeats the trials and
makes the tables of docs/failover.md.
In: kinds of fault and their number. Out: docs/failover.json and failover-partition.json, the tables, and exit code 1
when a message was lost.
"""
