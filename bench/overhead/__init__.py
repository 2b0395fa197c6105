"""What steering costs a training job per step: our code on the training thread, and blocks with and without a session.

`training` is the model and a step of each arm (bench.kernel trains it, too), `ranks` is what each process measures,
`__main__` runs the job beside a broker and judges the figures. In: number of pairs, length of a step, model. Out: the
report of docs/overhead.md. A new part of our code that runs in each step is added to `ranks.time_our_code`.
"""
