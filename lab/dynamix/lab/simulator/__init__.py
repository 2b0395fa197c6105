"""Simulator: N workers train one model in this process, on a clock made of formulas.

In: a scenario file, a data set, actions. Out: reports, receipts and evaluations, made by the trainer's own code.
`scenario` is the file, `cluster` the job, `clairvoyant` one that knows the rates of every step, `clock` and
`disturbances` the time that a step takes, `gradients` and `perceptron` the real gradients, `exchange` how they travel
where that is decided, `rounds` local steps, `lockstep` the same on a bus, `calibration` fits a scenario to a recorded
job.
"""
