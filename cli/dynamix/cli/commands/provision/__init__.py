"""Create the broker's streams, or bring them up to date."""
