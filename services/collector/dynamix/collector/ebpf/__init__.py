"""The eBPF probe: what each TCP socket of the ranks received, had acknowledged and sent again, kept in the kernel."""
