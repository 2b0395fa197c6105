"""Check what this machine has, what is missing, and how to fix it."""
