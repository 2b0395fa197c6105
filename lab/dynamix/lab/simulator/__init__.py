"""Simulator: N workers train one model in this process, on a clock made of formulas.

In: a scenario file, a data set, actions. Out: reports, receipts and evaluations, made by the trainer's own code.
`scenario` reads files and suites of them, `clock` has the time of a step and the disturbances, `gradients` the real
gradients, `exchange` their communication where that is decided, `rounds` local steps, `cluster` the job, `episode`
joins it to the services' functions and runs many in parallel.
"""
