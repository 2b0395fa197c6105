"""The reward service: metric windows in, rewards out, every term kept apart."""
