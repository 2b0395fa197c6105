"""Communication: carries out what the codecs of an exchange ask for, between the ranks of a job.

In: buckets of a model and the exchange that rules a step. Out: their sums over ranks, in place. `pipeline` has two
threads, each with a process group of its own, `model_exchange` the codecs of one model, `lent_tensors` what is handed
to a process group.

You may change what runs in which thread. What must stay: the same collectives in the same order on all ranks, and no
thread of a process group that needs the interpreter.
"""
