"""`dynamix capture`: what the streams hold of one job, into a file, also while it runs."""
