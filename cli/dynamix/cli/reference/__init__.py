"""docs/reference.md, made of the code; `__main__` prints it."""
