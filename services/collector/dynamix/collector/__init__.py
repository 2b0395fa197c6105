"""The collector, one per node: reports in, metric windows and states out, with what the kernel knows of the ranks."""
