"""Wire: the way to the bus and back, in a thread of its own; training never waits for it.

In: messages of this rank. Out: actions on its job. `client` is the thread with its event loop, `outbox` the bounded
queue in between, `transport` the interface of both, `earlier_starts` one question to the bus when the job attaches.
`loggers` hands each window's metrics to the user's own tools, in another thread.

You may change what is dropped when the bus is away. What must stay: a call from the training thread returns at once.
"""
