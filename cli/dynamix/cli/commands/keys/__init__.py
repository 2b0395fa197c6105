"""Create, revoke and list the keys that let users in at the broker."""
