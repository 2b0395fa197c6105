"""Measurement: what this rank measures of itself in a window, as one row of numbers."""
