"""Shared by all services: bus, frame of a service, heartbeat and watchdog, settings, logs, an embedded broker.

`bus` reaches NATS, `health` shows a process's state on it, `service` runs a process from settings to exit code; each
imports only those before it and the modules of this folder: `settings`, `log`, `rate_limit`, `extensions` (other
packages' code by name), `embedded` (nats-server on loopback), `die_with_parent`. Nothing here knows windows or
policies.
"""
