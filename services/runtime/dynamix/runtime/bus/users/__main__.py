"""Write the files of deploy/users: `python -m dynamix.runtime.bus.users deploy/users/users.conf`."""

import sys
from pathlib import Path

from .users_file import DEFAULT, users_files

if __name__ == "__main__":
    for path, text in users_files(Path(sys.argv[1]), DEFAULT).items():
        path.write_text(text)
