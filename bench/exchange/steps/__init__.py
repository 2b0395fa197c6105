"""Steps per second of whole training steps, by codec: workloads under DDP on hosts with shaped links.

`plan` says what is measured, `rank` is one process, `hook` lets a codec sum DDP's buckets, `result` makes figures.
"""
