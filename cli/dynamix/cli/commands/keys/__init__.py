"""Create, rotate, revoke and list keys of the broker's users, each for certain jobs or nodes."""
