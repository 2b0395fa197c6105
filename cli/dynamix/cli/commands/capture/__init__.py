"""Record a job: all its messages into one file."""
