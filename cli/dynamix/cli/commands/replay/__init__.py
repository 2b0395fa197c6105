"""Replay a capture into a service, and compare its output with the recorded one."""
