"""Connection to the bus, in a thread; training never waits for it."""
