"""A real training job across several hosts on this machine, with slow links and slow processors."""
