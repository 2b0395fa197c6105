"""What every service shares: the bus, the life of a process, settings, logging, an embedded broker."""
