"""Exchange of virtual ranks: the codecs of real ranks on each rank's own gradient, and what that costs.

In: one gradient per rank, or how far its parameters moved, and the exchange that rules the step. Out: the sum as real
ranks would have it, and the bytes that each collective put on the wire. `layout` cuts the model into buckets, `traffic`
counts while codecs run, `virtual` has the codecs of all ranks, `stacked` one of them for all ranks at once, `timing`
says how long it takes. What must stay: the bits are those of the trainer's own codecs.
"""
