"""The layout is the architecture: imports never point upward, and torch stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpuworker

ROOT = Path(gpuworker.__file__).parent

# From the bottom up. A module may import what stands in a row before its own, and within its
# own package anything. TYPE_CHECKING imports count.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("step",),
    ("config", "permit", "replies"),
    ("health",),
    ("messages",),
    ("events",),
    ("ipc",),
    ("device",),
    ("kernels",),
    ("comm",),
    ("model",),
    ("weights",),
    ("runner",),
    ("runtime",),
    ("torch_runtime",),
    ("lifecycle",),
    ("states",),
    ("reports",),
    ("announcer",),
    ("actor", "watchdog"),
    ("testing", "engine", "launch", "steplog"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
# What stands above ipc and yet must not lean on it, and the factory that names its product.
NOT_IPC = set(RANK) - {"ipc", "engine", "launch", "steplog", "cli", "testing", "__main__"}
EXCEPTIONS = {("runtime", "torch_runtime"), ("engine", "ipc")}

THIRD_PARTY = {
    "errors": set(),
    "config": {"msgspec"},
    "messages": {"msgspec"},
    "replies": {"msgspec"},
    "health": {"msgspec"},
    "events": {"msgspec"},
    "step": {"msgspec", "numpy"},
    "ipc": {"msgspec", "zmq", "anyio", "numpy"},
    "lifecycle": {"transitions", "anyio"},
    "states": {"anyio"},
    "actor": {"anyio", "msgspec"},
    "testing": {"numpy"},
    "launch": {"msgspec", "zmq", "anyio"},
    "steplog": {"msgspec", "numpy"},
    "engine": {"msgspec", "anyio", "numpy", "tokenizers", "jinja2"},
}


def _modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _top(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0]


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "gpuworker":
                names += [f"gpuworker.{alias.name}" for alias in node.names]
            else:
                names.append(node.module)
    return names


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    top = _top(path)
    if top == "__init__":
        return  # the package's root names its public parts, lazily
    assert top in RANK, f"{top} has no layer; add it to LAYERS"
    for name in _imports(path):
        root, _, rest = name.partition(".")
        if root == "gpuworker":
            target = rest.split(".")[0]
            if target in ("", top, "__version__") or (top, target) in EXCEPTIONS:
                continue
            if target not in RANK:
                continue
            assert RANK[target] < RANK[top], f"{path}: {top} imports {target}, which is above it"
            assert not (target == "ipc" and top in NOT_IPC), f"{path}: only edges import ipc"
        elif root not in sys.stdlib_module_names and top in THIRD_PARTY:
            assert root in THIRD_PARTY[top], f"{path}: {top} must not import {root}"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_its_layer_and_stays_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, f"{path} has more than one subject"
    if path != ROOT / "__init__.py" and not path.name.startswith("__main__"):
        doc = ast.get_docstring(ast.parse(text)) or ""
        assert doc.startswith("Layer "), f"{path}: the docstring must begin with its layer"


def test_only_one_module_imports_transitions() -> None:
    users = [
        path.name
        for path in _modules()
        if any(name.split(".")[0] == "transitions" for name in _imports(path))
    ]
    assert users == ["lifecycle.py"]


def test_states_do_not_import_each_other() -> None:
    shared = {"gpuworker.states.common", "gpuworker.states.residency"}
    for path in (ROOT / "states").glob("*.py"):
        if path.name != "__init__.py":
            assert {n for n in _imports(path) if n.startswith("gpuworker.states")} <= shared


@pytest.mark.parametrize(
    "statement",
    [
        "import gpuworker",
        "from gpuworker import BlockingClient, connect, messages, errors, WorkerConfig",
        "from gpuworker import GPUWorker",
        "from gpuworker import Engine",
        "import gpuworker.testing",
        "import gpuworker.launch",
    ],
)
def test_clients_and_schedulers_do_not_load_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules\nprint('fine')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout == "fine\n", result.stderr


def test_the_public_names_are_complete_and_importable() -> None:
    for name in gpuworker.__all__:
        assert getattr(gpuworker, name) is not None
    assert sorted(gpuworker.__all__) == sorted(set(gpuworker.__all__))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        gpuworker.nothing  # noqa: B018
