"""The documents about messages follow from the table and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpuworker import messages as m
from gpuworker.ipc.schema import json_schema, message_reference
from gpuworker.messages import message_tag


def test_the_schema_names_every_message_and_pairs_requests_with_replies() -> None:
    schema = json_schema()
    assert [reference["$ref"].rpartition("/")[2] for reference in schema["oneOf"]] == [
        request.__name__ for request in m.REQUESTS
    ]
    for request, reply in m.REPLY_OF.items():
        answers = schema["x-replies"][message_tag(request.__name__)]
        assert [answer["$ref"] for answer in answers] == [
            f"#/$defs/{reply.__name__}",
            "#/$defs/Failure",
        ]
        for cls in (request, reply):
            definition = schema["$defs"][cls.__name__]
            assert definition["prefixItems"][0] == {"enum": [message_tag(cls.__name__)]}
            assert len(definition["prefixItems"]) == 1 + len(cls.__struct_fields__)


@pytest.mark.parametrize("cls", [*m.REPLY_OF, *m.REPLY_OF.values(), m.Failure])
def test_the_reference_describes_a_message_and_its_fields(cls: type) -> None:
    reference = message_reference()
    section = reference.split(f"\n## {message_tag(cls.__name__)}\n", 1)[1].split("\n## ", 1)[0]
    assert cls.__doc__ is not None
    assert cls.__doc__.splitlines()[0] in section
    for field in cls.__struct_fields__:
        assert f"| `{field}` |" in section


def test_the_reference_takes_the_meaning_of_a_field_from_its_source() -> None:
    section = message_reference().split("## limits\n", 1)[1].split("\n## ", 1)[0]
    assert "| `next_step_id` |" in section
    assert "The smallest step id that is accepted." in section


def test_the_documents_are_the_same_in_every_process() -> None:
    script = (
        "import json\nfrom gpuworker.ipc.schema import *\n"
        "print(json.dumps([json_schema(), message_reference()]))"
    )
    here = json.dumps([json_schema(), message_reference()])
    for seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert other.stdout.strip() == here
