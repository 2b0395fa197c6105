"""Gradients: exact weighting, the times of a step, the noise estimate and the learning rate."""
