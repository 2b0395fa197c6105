"""The arbitrator: state vectors in, one batch action per job and window out."""
