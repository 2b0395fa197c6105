"""The page of `dynamix dashboard`: jobs and captures as JSON, and a web server that shows them; it only reads.

`documents` is pure: change there what is shown. `server` is the shell: routes, events, uvicorn, and the `Gate` that
decides who may read. `page/` is what a browser runs: HTML, CSS, ES modules, and uPlot with its licence in
`page/vendor/`.
"""

import secrets
from pathlib import Path

from dynamix.runtime.input_files import read_regular
from dynamix.runtime.settings import is_loopback

MIN_TOKEN_CHARACTERS = 16


def token_of(host: str, file: str | None) -> str:
    """The token that readers need: the one in the file, beyond loopback else a new one; empty: none is needed.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when the token is too short.
    """
    if not file:
        return "" if is_loopback(host) else secrets.token_urlsafe(24)
    token = read_regular(Path(file)).decode(errors="replace").strip()
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ValueError(f"{file}: a token needs at least {MIN_TOKEN_CHARACTERS} printable ASCII characters")
    return token
