"""The shape of the repository, held: the namespace, who imports whom, and who may touch the outside world."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = {
    "schemas": ROOT / "schemas",
    **{name: ROOT / "services" / name for name in ("runtime", "collector", "reward", "arbitrator", "trainer")},
    "recording": ROOT / "recording",
    "lab": ROOT / "lab",
    "cli": ROOT / "cli",
    "extras": ROOT / "extras",
}
MAY_IMPORT = {
    "schemas": set(),
    "runtime": {"schemas"},
    "collector": {"schemas", "runtime"},
    "reward": {"schemas", "runtime"},
    "arbitrator": {"schemas", "runtime"},
    "trainer": {"schemas", "runtime"},
    "recording": {"schemas", "runtime", "collector", "reward", "arbitrator"},
    "lab": {"schemas", "runtime", "collector", "reward", "arbitrator", "trainer", "recording"},
    "cli": {"schemas", "runtime", "collector", "reward", "arbitrator", "trainer", "recording", "lab"},
    "extras": {"schemas", "runtime", "collector", "reward", "arbitrator", "trainer", "recording", "lab", "cli"},
}
PURE_CORES = {
    "collector": {"agent", "window", "procfs", "ebpf"},
    "reward": {"formula"},
    "schemas": {"apportion", "features", "policies"},
    "arbitrator": {
        *("deciding.fold", "deciding.signatures", "policies"),
        *("learned.policy", "learned.policy_file", "learning.ppo", "learning.rollout"),
    },
    "trainer": {
        *("data.plan", "gradient.noise", "measurement.meter", "steering.fast_loop", "steering.offers"),
    },
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    top = ROOTS[package] / "dynamix" / package
    for path in sorted(top.rglob("*.py")):
        yield ".".join(path.relative_to(top).with_suffix("").parts), path


def module_name(path: Path) -> str:
    """The name that a module is imported by; the package for its `__init__.py`."""
    top = next((top for top in ROOTS.values() if path.is_relative_to(top)), ROOT)
    return ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of everything a module imports."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            where = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{where}.{alias.name}" for alias in node.names)


def test_no_root_closes_the_namespace() -> None:
    assert [path for path in ROOT.rglob("dynamix/__init__.py") if ".venv" not in path.parts] == []


@pytest.mark.parametrize("package", ROOTS)
def test_services_never_import_each_other(package: str) -> None:
    for name, path in modules(package):
        for imported in imports(path):
            parts = imported.split(".")
            if parts[0] == "dynamix":
                assert parts[1] == package or parts[1] in MAY_IMPORT[package], f"{package}.{name} imports {imported}"


@pytest.mark.parametrize("package", ROOTS)
def test_only_the_bus_knows_nats(package: str) -> None:
    for name, path in modules(package):
        if package == "runtime" and name.startswith("bus."):
            continue
        assert not any(imported.split(".")[0] == "nats" for imported in imports(path)), f"{package}.{name} imports nats"


def is_in(name: str, core: str) -> bool:
    """Whether a module is that module, or lies in that room."""
    return name == core or name.startswith(f"{core}.")


@pytest.mark.parametrize("package", PURE_CORES)
def test_the_thinking_knows_neither_bus_nor_event_loop(package: str) -> None:
    found = {core for core in PURE_CORES[package] for name, _ in modules(package) if is_in(name, core)}
    assert found == PURE_CORES[package]
    for name, path in modules(package):
        if any(is_in(name, core) for core in PURE_CORES[package]):
            outside = [
                i
                for i in imports(path)
                if i.split(".")[0] in ("asyncio", "nats")
                or (i.startswith("dynamix.runtime") and not i.startswith("dynamix.runtime.extensions."))
            ]
            assert outside == [], f"{package}.{name} is no longer pure"


@pytest.mark.parametrize("package", ROOTS)
def test_nothing_happens_on_import(package: str) -> None:
    """A module's top level defines; it configures no logging, installs no signal handler, starts no loop or thread."""
    for name, path in modules(package):
        if name.split(".")[-1] == "__main__":
            continue
        for node in ast.parse(path.read_text()).body:
            assert not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)), (
                f"{package}.{name} acts on import"
            )


def folder_edges() -> dict[str, set[str]]:
    """Which folders a folder's modules import from; what an `__init__.py` re-exports from below is left out."""
    modules = {module_name(path): path for top in ROOTS.values() for path in sorted(top.rglob("*.py"))}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        own = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in imports(path):
            module = imported if imported in modules else imported.rpartition(".")[0]
            if module not in modules:
                continue
            folder = module if modules[module].name == "__init__.py" else module.rpartition(".")[0]
            reexported = path.name == "__init__.py" and folder.startswith(f"{own}.")
            if folder != own and not reexported:
                edges.setdefault(own, set()).add(folder)
    return edges


def test_folders_never_import_each_other_in_a_circle() -> None:
    edges = folder_edges()
    while leaves := {folder for folder in edges if not edges[folder] & edges.keys()}:
        edges = {folder: targets for folder, targets in edges.items() if folder not in leaves}
    assert edges == {}, "each of these folders imports another of them"
