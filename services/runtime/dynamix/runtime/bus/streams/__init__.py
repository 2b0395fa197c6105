"""Messages into and out of streams: publishing with retries, consuming in order, what a stream holds.

In come bytes to publish and the filters of a reader; out go acknowledged sequences and `BusMessage`s, each once, over
lost connections and restarted brokers. `subscription` is the exception: core NATS, where nothing is stored.
"""
