"""Gradient: exact weighting, the noise estimate and the learning rate, for batch sizes that differ and change.

`models` tells the user's models apart, `covered` holds those of one session; `hook` is the DDP hook and the factor on
the loss, `micro_batches` adds up and halves batches, `noise` has the estimator of method section 5.2, `learning_rate`
what a changed global batch does to the rate, its schedule and the updates. What must stay: g = sum (b_i/B) g_i, to
rounding.
"""
