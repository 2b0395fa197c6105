"""What control without a centre does: `python -m bench.stigmergy`.

It compares the policy `stigmergy` with central ones on virtual clusters, also after arbitrator or agents died.
"""
