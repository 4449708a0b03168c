"""The table of rooms: which may import which. Late imports count, and imports for type checking too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room may import the rooms named here, itself, and those in EVERYONE.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "text": set(),
    "atomic": set(),
    "parallel": set(),
    "layers": {"parallel"},
    "latents": set(),
    "media": set(),
    "autoencoders": {"parallel", "layers"},
    "demo": set(),
    "jobs": {"autoencoders", "parallel", "layers", "latents", "media", "demo", "launch"},
    "launch": {"parallel"},
    "cli": {"jobs", "launch", "latents", "media", "autoencoders"},
    "__main__": {"cli"},
    "__init__": set(),
}
EVERYONE = {"errors", "config", "text", "atomic", "__init__"}
# Rooms whose import must not load torch: the command line answers --help without it.
LIGHT = ("vaepar", "vaepar.config", "vaepar.latents", "vaepar.media", "vaepar.launch", "vaepar.cli.main")


def sources() -> list[Path]:
    return sorted([*(ROOT / "vaepar").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "cli" if parts[0] == "cli" else parts[1].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            # Inside its own folder only: what comes from further up is written in full, where this table sees it.
            assert room_of(path) == "cli", f"{path}:{node.lineno}"
            assert node.level == 1, f"{path}:{node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} if node.module != "vaepar" else {f"vaepar.{alias.name}" for alias in node.names}
    rooms = {name.split(".")[1] for name in names if name.startswith("vaepar.")}
    return {"__init__" if room == "__version__" else room for room in rooms}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_the_table_allows(path: Path) -> None:
    room = room_of(path)
    imports = imported_rooms(path)
    assert imports <= ALLOWED[room] | EVERYONE | {room}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_distributed_is_imported_where_ranks_meet_start_or_are_described(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    allowed = {"vaepar/parallel/torch_group.py", "vaepar/launch.py", "cli/env.py"}
    users = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and "distributed" in {a.name for a in node.names}
        )
        or (isinstance(node, ast.Import) and any(alias.name.startswith("torch.distributed") for alias in node.names))
    }
    assert not users or str(path.relative_to(ROOT)) in allowed


@pytest.mark.parametrize("module", LIGHT)
def test_light_rooms_load_no_torch(module: str) -> None:
    import subprocess
    import sys

    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_no_assert_meets_user_input() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert not found
