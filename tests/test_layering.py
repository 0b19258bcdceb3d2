"""Imports only point downwards through the rooms of the package."""

import ast
from pathlib import Path

import pytest

import offload

PACKAGE = Path(offload.__file__).parent

RANKS = [
    ["__main__"],
    ["cli"],
    ["__init__"],
    ["_report"],
    ["tier_report"],
    ["_wrap"],
    ["planner"],
    ["installer"],
    ["layer_call"],
    ["tiling"],
    ["probe"],
    ["executor", "checkpoint", "discovery"],
    ["tape", "layer_arguments", "interception", "installation"],
    ["ambient", "parameter_aliases", "saved_object", "snapshots"],
    ["adapters"],
    ["lazy_logits", "stand_in"],
    ["ops", "store"],
    ["_native"],
    ["_C", "_source_hash"],
]
"""From the top; a module imports only what stands below its own line."""

ANYWHERE = {"devices", "errors", "policy"}
"""Import nothing of the package, so that every room may import them."""

RANK_OF = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "offload"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "offload":
                found |= {f"offload.{alias.name}" for alias in node.names}
            elif node.module and node.module.startswith("offload."):
                found.add(node.module)
    return found


MODULES = {
    ".".join(("offload", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    room = room_of(module)
    imported = {room_of(name) for name in imports_of(MODULES[module])} - {room}
    if room in ANYWHERE:
        assert not imported
        return
    assert room in RANK_OF, f"{module}: give its room a place in RANKS"
    for other in imported - ANYWHERE:
        assert RANK_OF[other] > RANK_OF[room], f"{module} imports offload.{other}"


def test_only_native_imports_the_compiled_module():
    importers = [m for m, path in MODULES.items() if "offload._C" in imports_of(path)]
    assert importers == ["offload._native"]


def test_third_party_libraries_stay_in_their_adapters():
    libraries = {"transformers", "accelerate", "peft"}
    for module, path in MODULES.items():
        if room_of(module) == "adapters":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not libraries & {name.split(".")[0] for name in names}, module


def test_triton_is_imported_by_its_kernels_only():
    """So that everything else runs where it is not installed."""
    for module, path in MODULES.items():
        if not module.startswith("offload.ops.fused"):
            text = path.read_text()
            assert "import triton" not in text, module
            assert "from triton" not in text, module


def test_no_file_bears_the_name_of_something_exported():
    assert not set(offload.__all__) & {path.stem for path in PACKAGE.iterdir()}
