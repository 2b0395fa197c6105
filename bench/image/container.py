"""A command in an image's tree, closed as a container is: its user, no capability, nothing that it can write."""

from collections.abc import Mapping

from .tree import ImageTree


def container_command(tree: ImageTree, *command: str) -> list[str]:
    """What to run for a command in the tree; for its entry point without one.

    It replaces itself, so that its process id is the command's. It sees network and processes of the machine, as
    compose.yaml lets the collector.
    """
    user, _, group = tree.user.partition(":")
    mounts = (
        f"mount --bind '{tree.root}' '{tree.root}' && mount -t proc proc '{tree.root}/proc' "
        f"&& mount --rbind /dev '{tree.root}/dev' && mount -o remount,bind,ro '{tree.root}' && cd '{tree.root}'"
    )
    closed = "setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+sys_chroot,+setuid,+setgid"
    script = f'{mounts} && exec {closed} /usr/sbin/chroot --userspec={user}:{group or user} --groups= . "$@"'
    words = command or tree.entrypoint
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *words]


def container_environment(tree: ImageTree, environ: Mapping[str, str]) -> dict[str, str]:
    """The image's variables and the given ones, and none of ours."""
    return {**tree.environ, **environ}
