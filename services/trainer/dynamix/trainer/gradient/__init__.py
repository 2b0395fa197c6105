"""Gradients: exact weighting, the noise estimate and the learning rate, for batch sizes that differ and change."""
