"""Aggregation throughput: how fast ranks on hosts with shaped links sum a gradient, by codec, density and mask.

`plan` says what is measured, `gradients` makes what is summed, `arms` are the ways to sum it, `rank` is one process of
a case, `runner` starts them on hosts, `result` makes figures of their timings; `figures` and `runner` also serve
`steps`. A codec that the trainer's registry knows is an arm without any change here.
"""
