"""Choose the settings of the baselines on the train scenarios."""
