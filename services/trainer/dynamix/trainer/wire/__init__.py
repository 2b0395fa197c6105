"""Wire: the way to the bus and back, in a thread of its own; training never waits for it.

In: messages of this rank. Out: actions on its job, and rewards. `client` is the thread with its event loop, `transport`
what the training thread calls, and the bounded queue in between.

You may change what is dropped when the bus is away. What must stay: a call from the training thread returns at once.
"""
