"""The command `dynamix policy`."""
