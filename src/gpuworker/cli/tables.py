"""Layer 5. `gpuworker states | diagram | schema`: what the tables say."""

from __future__ import annotations

import argparse
import json

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.ipc.schema import json_schema, message_reference
from gpuworker.lifecycle import legality_table, mermaid
from gpuworker.messages import message_tag
from gpuworker.states import TABLES

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the three verbs."""
    states = add_verb(
        subparsers,
        "states",
        help="which message is accepted in which state",
        description="Print the legality matrix: every message against every state.",
        examples="  gpuworker states\n  gpuworker states --json | jq .serving",
    )
    states.add_argument("--json", action="store_true", help="{state: {message: where it leads}}")
    states.set_defaults(run=_states)
    diagram = add_verb(
        subparsers,
        "diagram",
        help="the state diagram in Mermaid",
        description="Print the moves as a Mermaid state diagram.",
        examples="  gpuworker diagram > lifecycle.mmd",
    )
    diagram.set_defaults(run=_diagram)
    schema = add_verb(
        subparsers,
        "schema",
        help="the JSON schema of the messages",
        description="Print the JSON schema of every message, or the reference as Markdown.",
        examples="  gpuworker schema > messages.schema.json\n  gpuworker schema --markdown | less",
    )
    schema.add_argument("--markdown", action="store_true", help="the reference for people")
    schema.set_defaults(run=_schema)


def _states(arguments: argparse.Namespace) -> int:
    if not arguments.json:
        print(legality_table(TABLES), end="")
        return 0
    matrix = {
        table.state.value: {
            **{message_tag(edge.message.__name__): edge.dest.value for edge in table.edges},
            **{message_tag(message.__name__): table.state.value for message in table.in_place},
        }
        for table in TABLES
    }
    print(json.dumps(matrix))
    return 0


def _diagram(arguments: argparse.Namespace) -> int:
    print(mermaid(TABLES), end="")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    print(message_reference() if arguments.markdown else json.dumps(json_schema(), indent=2))
    return 0
