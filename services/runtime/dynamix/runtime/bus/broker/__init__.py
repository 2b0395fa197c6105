"""The broker as we reach it: one connection that reconnects for ever, requests to JetStream's API, and their errors.

Only this folder deals with nats-py's client. It knows subjects, payloads and headers as bytes, and nothing of messages,
streams' positions or objects.
"""
