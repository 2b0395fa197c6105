"""Subjects of the service protocol of NATS, which no service answers any more: permissions still list them."""

PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")
