"""`dynamix calibrate`: a scenario from a real job's metric windows, and how true it is."""
