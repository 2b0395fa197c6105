"""Experiments: episodes on virtual clusters, learning policies on them, tuning baselines, honest comparison."""
