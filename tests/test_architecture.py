"""The house keeps its shape: imports go down the layers only, files stay small, the light core stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "anaphora"
HEAVY = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "prometheus_client"}
ROOT = {"errors", "types", ""}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "native": ROOT,
    "geometry": ROOT,
    "blocks": ROOT,
    "explain": ROOT | {"blocks"},
    "planning": ROOT | {"geometry"},
    "storage": ROOT | {"geometry"},
    "tiers": ROOT | {"blocks.eviction"},
    "engine": ROOT | {"native", "geometry", "blocks", "storage", "tiers", "explain"},
    "server": ROOT | {"engine", "explain"},
    "probes": ROOT | {"explain.difference"},
    "replay": ROOT | {"blocks", "tiers", "geometry", "explain"},
}
NEVER: dict[str, set[str]] = {
    "errors": HEAVY,
    "types": HEAVY,
    "native": HEAVY,
    "geometry": HEAVY,
    "blocks": HEAVY,
    "explain": HEAVY,
    "planning": HEAVY,
    "storage": HEAVY - {"torch"},
    "tiers": HEAVY,
    "engine": {"fastapi", "starlette", "uvicorn", "prometheus_client"},
    "server": {"torch", "transformers"},
    "probes": HEAVY,
    "replay": HEAVY,
}
FILES = sorted(SRC.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:  # `from a import b` may name the module a.b
                dotted = f"{node.module}.{alias.name}"
                inner = SRC.parent / Path(*dotted.split("."))
                yield dotted if inner.with_suffix(".py").exists() or inner.is_dir() else node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_respect_the_layers(path: Path) -> None:
    layer = layer_of(path)
    if layer in ("cli", "", "__main__"):
        return
    for module in imports(path):
        top = module.partition(".")[0]
        assert top not in NEVER[layer], f"{path} imports {module}"
        if top == "anaphora":
            inner = module.removeprefix("anaphora").lstrip(".")
            target = inner.partition(".")[0]
            allowed = MAY_IMPORT[layer] | {layer}
            assert target in allowed or inner in allowed, f"{path} ({layer}) imports {module}"


def test_no_circular_imports() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = "anaphora." + ".".join(path.relative_to(SRC).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        # imports under TYPE_CHECKING never run; everything else counts, inside functions too
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        }
        found: set[str] = set()
        for node in ast.walk(tree):
            if id(node) in guarded:
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        graph[name] = {module for module in found if module.startswith("anaphora.") and module != name}

    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "circle: " + " -> ".join((*trail[trail.index(name) :], name))
        if name in done or name not in graph:
            return
        for module in graph[name]:
            visit(module, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_no_file_over_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_command_line_starts_without_heavy_packages() -> None:
    code = (
        "import sys; from anaphora.cli.main import COMMANDS, cli; [cli.get_command(None, name) for name in COMMANDS];"
        f"print(sorted(set({sorted(HEAVY)!r}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
