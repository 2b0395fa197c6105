"""Everything sent over the bus: messages, their kinds, subjects and streams, the state's features, the codec.

`messages` holds the structs; `subjects` has the one table of how each is sent, from which `codec` and docs/subjects.md
derive; `streams` states what JetStream keeps, `features` what a state holds. `policies` states every policy's options.
`apportion`, `networks` and `sight` are rules that several services must apply alike; `spelling` answers to misspelt
names. A new field goes at the end of its struct and has a default; golden bytes hold the wire format. This package
imports no other of ours.
"""
