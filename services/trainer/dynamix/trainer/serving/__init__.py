"""Gradient servers: processes without a model that sum parts of the gradients of a job, and know nothing else of it.

In: pieces of the ranks' gradients, with what to do with them. Out: their sums, to all ranks. `sums` adds, `lanes` talks
to the ranks of one job, `server` waits for one job after the other.

You may change how pieces are added, in rank order. What must stay: a server keeps nothing from one sum to the next, so
that a job that is started again finds it as it was.
"""
