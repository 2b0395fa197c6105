"""Learning from live jobs: a consumer of its own, beside the decisions that never wait for it."""
