"""Adapters: in comes a framework's training loop, out goes a session that its own hooks drive.

Each module is for one framework, imports it, and is imported by the user: nothing here is imported by
`dynamix.trainer`. The framework keeps its schedules, logs, accumulation and checkpoints; an adapter replaces its loader
and says when a step ends.
"""
