"""Public case B19: no byte that arrives can choose what code runs.

A checker reads the package's syntax trees, and is itself shown that it finds what it looks for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import msgspec
import pytest

import gpuworker
from gpuworker.messages import REPLY_OF, REQUESTS

ROOT = Path(gpuworker.__file__).parent

MODULES = {
    "_pickle",
    "builtins",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "multiprocessing",
    "pickle",
    "shelve",
    "xmlrpc",
}
"""Whose loaders build whatever the bytes say; multiprocessing's connections unpickle."""
FUNCTIONS = {
    "numpy.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.load",
    "torch.package.PackageImporter",
    "torch.serialization.load",
    "yaml.load",
    "yaml.unsafe_load",
}
BUILTINS = {"__import__", "compile", "eval", "exec"}
"""As names: calling them is not needed for handing them to somebody who does."""
ANYWHERE = {
    "Ext",
    "allow_pickle",
    "dec_hook",
    "ext_hook",
    "recv_pyobj",
    "recv_serialized",
    "send_pyobj",
    "send_serialized",
    "trust_remote_code",
    "weights_only",
}
"""As names, attributes, keywords and in strings that are nothing else."""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names(tree: ast.AST) -> dict[str, str]:
    """What the imported names of a module stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _findings(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = _names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES:
                yield module
            yield from (
                a.name
                for a in node.names
                if a.name in ANYWHERE or f"{module}.{a.name}" in FUNCTIONS
            )
        elif isinstance(node, (ast.Attribute, ast.Name)):
            head, _, rest = _dotted(node).partition(".")
            full = ".".join(filter(None, (names.get(head, head), rest)))
            if full in FUNCTIONS:
                yield full
            if isinstance(node, ast.Name) and node.id in BUILTINS:
                yield node.id
            last = full.rpartition(".")[2]
            if last in ANYWHERE:
                yield last
            if head == "__builtins__":
                yield head
        elif isinstance(node, ast.keyword) and node.arg in ANYWHERE:
            yield node.arg
        elif isinstance(node, ast.Constant) and node.value in ANYWHERE | MODULES:
            yield node.value


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_module_has_nothing_that_runs_what_it_reads(path: Path) -> None:
    assert list(_findings(path.read_text())) == []


BAD = [
    "import pickle",
    "import pickle as harmless",
    "def later():\n    import pickle",
    "from pickle import loads",
    "from _pickle import Unpickler as U",
    "import cloudpickle, os",
    "import marshal",
    "import shelve",
    "from multiprocessing.connection import Listener",
    "socket.recv_pyobj()",
    "self.socket.send_pyobj(x)",
    "f = socket.recv_serialized",
    "getattr(socket, 'recv_pyobj')()",
    "import importlib\nimportlib.import_module('pickle')",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=True)",
    "import torch as t\nt.load(path)",
    "from torch import load\nload(path)",
    "from torch import load as read",
    "from torch.serialization import load",
    "import torch\nloader = torch.jit.load",
    "import numpy as np\nnp.load(path)",
    "msgspec.msgpack.Decoder(T, ext_hook=f)",
    "msgspec.msgpack.Decoder(T, dec_hook=f)",
    "from msgspec.msgpack import Ext",
    "msgspec.msgpack.Ext(1, b'')",
    "options = {'ext_hook': f}",
    "eval(text)",
    "list(map(eval, texts))",
    "exec(code)",
    "compile(text, '', 'exec')",
    "__import__(name)",
    "__builtins__['ev' + 'al'](text)",
    "import builtins",
    "AutoConfig.from_pretrained(path, trust_remote_code=True)",
]


@pytest.mark.parametrize("source", BAD)
def test_the_checker_finds_what_it_looks_for(source: str) -> None:
    assert list(_findings(source))


GOOD = [
    "model.eval()",
    "import json\njson.load(file)",
    "import re\nre.compile('x')",
    "import torch\ntorch.compile(model)",
    "from safetensors.torch import load_file\nload_file(path)",
    "text = 'no pickle on any path'",
    "msgspec.msgpack.Decoder(T)",
]


@pytest.mark.parametrize("source", GOOD)
def test_the_checker_lets_the_rest_be(source: str) -> None:
    assert list(_findings(source)) == []


OPEN_TYPES = (
    msgspec.inspect.AnyType,
    msgspec.inspect.CustomType,
    msgspec.inspect.ExtType,
    msgspec.inspect.RawType,
)


def _types(info: object, seen: set[int]) -> Iterator[object]:
    """Every type that a message consists of."""
    if id(info) in seen:
        return
    seen.add(id(info))
    yield info
    if isinstance(info, (list, tuple)):
        for item in info:
            yield from _types(item, seen)
    elif isinstance(info, msgspec.Struct):
        for name in info.__struct_fields__:
            value = getattr(info, name)
            if isinstance(value, (msgspec.Struct, list, tuple)):
                yield from _types(value, seen)


def _is_open(message: Any) -> bool:
    return any(isinstance(t, OPEN_TYPES) for t in _types(msgspec.inspect.type_info(message), set()))


def test_a_message_consists_of_plain_types_only() -> None:
    for message in (*REQUESTS, *REPLY_OF.values()):
        assert not _is_open(message), message


@pytest.mark.parametrize(
    "hole", [Any, object, list[Any], dict[str, Any], msgspec.Raw, msgspec.msgpack.Ext, complex]
)
def test_an_open_field_would_be_found(hole: Any) -> None:
    inner = msgspec.defstruct("Inner", [("field", hole)], tag=True)
    outer = msgspec.defstruct("Outer", [("items", list[inner])])  # type: ignore[valid-type]
    assert _is_open(outer)
    assert _is_open(Union[outer, None])  # noqa: UP007
    assert not _is_open(msgspec.defstruct("Plain", [("field", list[int])]))
