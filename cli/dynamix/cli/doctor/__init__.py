"""`dynamix doctor`: what this machine has, what it lacks, and how to mend it."""
