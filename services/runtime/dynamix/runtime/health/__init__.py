"""What a process shows of its own state: heartbeat, dead letters, a watchdog over its event loop.

Services and training processes share it. In come the process's counters and messages that cannot be used; out go
`live` and `dead` messages, log lines, and, where an event loop is stuck for too long, the process's exit code.
It knows the bus, and nothing of settings, signals or any one service.
"""
