"""Steering: all ranks adopt an allocation on the same step or none does; nothing here waits for the bus."""
