"""Local steps: rounds in which each rank steps alone (`rounds`)."""
