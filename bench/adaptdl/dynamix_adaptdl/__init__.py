"""AdaptDL's published goodput code (0.2.11) as the policy `adaptdl`: a baseline of the benchmarks, not of the product.

In: what DYNAMIX observes of a job. Out: the global batch that AdaptDL would choose. `profile` turns our windows into
its measurements; `policy` asks its code. Nothing of AdaptDL is copied, and nothing in the product imports this.
"""
