"""Job: its options, as `attach` got them, and its identity on the bus."""
