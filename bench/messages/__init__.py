"""Messages of jobs of any size, made without training: what benchmarks send, store and read.

`load` makes the reports of a job's nodes and what their collectors make of them, window after window, `recording`
stores a whole job as a capture, `readers` reads a stream with our bus and with bare nats-py, `stored` what it has of a
subject. In: a number of workers, a policy, a seed. Out: the messages that the services' own functions give. What a
message holds is the product's; change how fast or slow ranks are here.
"""
