"""The virtual cluster: real gradients of N workers in one process, and a virtual clock for where their time goes."""
