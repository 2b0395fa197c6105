"""Object stores: whole files on the bus, in JetStream's standard layout, which the official tools read, too.

`layout` names streams and subjects and describes objects, without I/O; `store` writes and reads them over `streams`.
"""
