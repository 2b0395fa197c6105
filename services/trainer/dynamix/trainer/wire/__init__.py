"""Wire: the way to the bus and back, in a thread of its own; training never waits for it."""
