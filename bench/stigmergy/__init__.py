"""What control without a centre does: `python -m bench.stigmergy` and `python -m bench.stigmergy.narrow`.

The first compares the policy `stigmergy` with central ones on virtual clusters, also after arbitrator or agents died.
The second is the check of the method's source, small: agents that learn, each for itself, to share a narrow passage.
"""
