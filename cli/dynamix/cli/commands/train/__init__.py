"""Start a training script with torchrun, connected to the bus."""
