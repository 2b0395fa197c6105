"""Exchange: how the gradients of all ranks become one sum, as plainly or as sparingly as the job allows.

In: a bucket of weighted gradients. Out: the sum over ranks in its place, with the same bits on every rank.
`collectives` are what a codec asks for, as values; `codec` is what every codec gets and must hold to, `registry` finds
one by name. `owners` sends gradients as they are, by the all-reduce or to those that sum them; `casts` and `int8`
narrow them, in the exchange of `lossy`, with `residuals`; `low_rank` sends two thin factors of a matrix; `rows` and
`sketch` leave out what is zero (`signed_zeros`), with what is computed in `sparse/`.

You may add a codec, here or in a package of your own. What must stay: every decision is made from what all ranks know.
"""
