"""Local steps: each rank updates its own parameters, and at the end of a round all have their weighted mean.

In: the exchange that rules a step, the models and optimizers of a session. Out: parameters, buffers and optimizer
states, averaged. `rounds` says when, `parameters` and `buffers` how far they moved in a round, `outer` where they
go from there, `optimizer_state` averages what optimizers remember.

You may change when a round ends early. What must stay: an exchange begins where all ranks have the same parameters.
"""
