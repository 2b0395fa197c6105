"""Data: which samples this rank uses in each step. This room imports no other room of the trainer but `arguments`."""
