"""Exchange: how the gradients of all ranks become one sum.

`collectives` are what a codec asks for, as values; `codec` is the contract, `codecs` finds one by name; `narrow` and
`rows` are those of the core. `plan` says which exchange is in effect on a step, `transport` runs collectives between
ranks and with gradient servers, `servers` is such a server.
"""
