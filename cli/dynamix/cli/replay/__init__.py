"""`dynamix replay`."""
