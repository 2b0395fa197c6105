"""Sum parts of a job's gradients in a process of their own (a parameter server)."""
