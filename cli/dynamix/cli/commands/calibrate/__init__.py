"""Fit a virtual cluster to a real job's metric windows."""
