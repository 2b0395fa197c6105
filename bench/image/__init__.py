"""deploy/Dockerfile without Docker: its stages as directories, measured, and their services run as containers would.

`dockerfile` reads the stages, `base` makes what they are built on, `tree` carries them out, `container` runs them. In
come the Dockerfile, the repository and Debian's archive; out go directories that hold what the images would hold. Only
the instructions that our file uses are known; another one is an error.
"""
