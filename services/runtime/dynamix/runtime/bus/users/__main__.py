"""Print deploy/users/users.conf: `python -m dynamix.runtime.bus.users > deploy/users/users.conf`."""

import sys

from .users_file import DEFAULT, write_users

if __name__ == "__main__":
    sys.stdout.write(write_users(DEFAULT))
