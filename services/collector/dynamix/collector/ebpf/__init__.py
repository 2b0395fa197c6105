"""The eBPF probe: traffic of each TCP socket of the ranks, counted in the kernel."""
