"""Gradient: exact weighting, the noise estimate and the learning rate, for batch sizes that differ and change.

In: the models and optimizers of a session, the plan of a step (how many samples each rank has), DDP's gradient buckets.
Out: the gradient of the whole batch, squared norms for the noise estimate, and each rank's compute time, carried by the
same all-reduce. `models` tells the user's models apart, `covered` holds those of one session; `weighting` is the DDP
hook and the factor on the loss, `weights` what a gradient counts, `accumulation` adds up micro-batches, `halving`
computes in parts what does not fit into memory, `time_slots` the slots behind the last bucket, `codecs` finds the codec
of a package, `noise` the estimator of method section 5.2 and Adam's metric for it. `updates` watches the optimizers,
`learning_rate` is what a changed global batch does to the rate, `schedulers` what it does to a schedule.

You may add a learning-rate rule or a statistic. What must stay: g = sum (b_i/B) g_i, to rounding.
"""
