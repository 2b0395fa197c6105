"""Data: which samples this rank uses in each step, whatever the batch sizes do.

In: the user's data set, and the allocations that steering schedules. Out: batches, each with the plan of its step.
`orders` says which samples an epoch has, `schedule` which allocation rules from which step on and divides whole
samples, `sampler` cuts one order shared by all ranks into steps, `division` those into ranks and micro-batches,
`stream` does so for what can only be read from the beginning, `loader` is the `DataLoader` that the user iterates over,
`reference_steps` counts in steps of the batch that the script was written for. `source` chooses by the data set.

You may change how an epoch ends or what the loader passes on. What must stay: every sample is used once per epoch,
all ranks make the same plan for a step without a message (only the order of a script's sampler and the end of a stream
are one, once per epoch), and a saved position resumes at the very sample.
This room imports no other room of the trainer but `arguments`.
"""
