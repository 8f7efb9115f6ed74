"""The pages under docs/ say what the tables say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuworker.cli.docs import generated_pages
from gpuworker.messages import REPLY_OF, message_tag

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["lifecycle.md", "messages.md", "messages.schema.json"])
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == generated_pages()[name], "run: make docs"


def test_every_message_and_every_field_is_described() -> None:
    reference = generated_pages()["messages.md"]
    for request, reply in REPLY_OF.items():
        for cls in (request, reply):
            assert f"## {message_tag(cls.__name__)}\n" in reference
            assert cls.__doc__ is not None
            assert cls.__doc__.splitlines()[0] in reference
            for field in cls.__struct_fields__:
                assert f"| `{field}` |" in reference


def test_the_schema_names_every_request_with_its_tag() -> None:
    schema = json.loads(generated_pages()["messages.schema.json"])
    assert len(schema["oneOf"]) == len(REPLY_OF)
    for request in REPLY_OF:
        definition = schema["$defs"][request.__name__]
        assert definition["prefixItems"][0] == {"enum": [message_tag(request.__name__)]}
