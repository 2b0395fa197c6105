"""How a rank speaks on the bus: what the training thread sees of it, and the thread that does it over nats."""
