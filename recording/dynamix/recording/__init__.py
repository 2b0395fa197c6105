"""Recording: a job's messages captured in one file, and played back into the services.

`capture` is the file format, `replay` plays a capture into a service and compares what it publishes with what was
recorded, `provenance` says which code and libraries made a number or a file.
"""
