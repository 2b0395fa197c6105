"""What the kernel probe costs: nanoseconds a packet, share of the machine, memory, and what shows from outside."""
