"""Changes of the broker's users: pure, from one list of users to the next."""

from collections.abc import Iterable

import msgspec

from dynamix.cli.errors import CommandError
from dynamix.runtime.bus.users.users_file import User
from dynamix.schemas.spelling import suggestion


def added(users: Iterable[User], user: User) -> list[User]:
    """With one more user. Raises CommandError when there is one of its name."""
    users = list(users)
    if any(other.name == user.name for other in users):
        raise CommandError(f"there is a user {user.name} already: rotate its key, revoke it first, or choose a name")
    return [*users, user]


def rotated(users: Iterable[User], name: str, key: str) -> list[User]:
    """With one more key of a user, who keeps all others: only `revoked` ends one. Raises CommandError without a key."""
    users = list(users)
    user = named(users, name)
    if not user.keys:
        raise CommandError(f"{name} has a password and no key: make-secrets.sh makes passwords, `create` makes keys")
    return _replaced(users, user, (*user.keys, key))


def revoked(users: Iterable[User], name: str, *, only_old: bool) -> list[User]:
    """Without a user, or with its newest key only. Raises CommandError where there is nothing to revoke."""
    users = list(users)
    user = named(users, name)
    if only_old:
        if len(user.keys) < 2:
            raise CommandError(f"{name} has no older key: without --old all that it has is revoked")
        return _replaced(users, user, user.keys[-1:])
    if len(users) == 1:
        raise CommandError(f"{name} is the only user: the broker would let anyone in without one")
    return [other for other in users if other is not user]


def named(users: Iterable[User], name: str) -> User:
    """The user of a name. Raises CommandError, with the nearest name, where there is none."""
    known = {user.name: user for user in users}
    if name not in known:
        raise CommandError(f"there is no user {name!r}{suggestion(name, known)}")
    return known[name]


def _replaced(users: Iterable[User], user: User, keys: tuple[str, ...]) -> list[User]:
    changed = msgspec.structs.replace(user, keys=keys)
    return [changed if other is user else other for other in users]
