"""Steer a real training job on this machine, and compare it with the same job left alone."""
