"""Run one job on a virtual cluster."""
