"""Layer 5. `gpuworker ask`: send one message by name and print the reply by field name."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import print_json
from gpuworker.cli.session import add_key_options, add_session_options, check_free, client_keys
from gpuworker.errors import ConfigError
from gpuworker.ipc import BlockingClient
from gpuworker.ipc.session import OBSERVER_REQUESTS
from gpuworker.messages import (
    REPLY_OF,
    REQUESTS,
    SESSION_REQUESTS,
    Request,
    as_dict,
    message_tag,
)

__all__ = ["add_parser", "build_request"]

_BY_TAG: dict[str, type[Request[Any]]] = {
    message_tag(r.__name__): r for r in REQUESTS if r not in SESSION_REQUESTS
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "ask",
        help="send one message to a worker and print its reply",
        description=(
            "Send one message to a worker and print its reply as JSON. Messages are named as on\n"
            "the wire; their fields are a JSON object. `gpuworker ask -l` lists them all.\n"
            "Questions (get_...) change nothing. Anything else is said as the worker's\n"
            "scheduler, which is refused while another one drives it."
        ),
        examples=(
            "  gpuworker ask ipc:///tmp/w/rank0 get_status\n"
            "  gpuworker ask ipc:///tmp/w/rank0 sleep '{\"level\": 2}'\n"
            '  gpuworker ask ipc:///tmp/w/rank0 resume_pools \'{"tags": ["weights"]}\''
        ),
    )
    parser.add_argument("-l", "--list", action="store_true", help="list the messages and stop")
    parser.add_argument("endpoint", nargs="?", help="ipc:///path or tcp://127.0.0.1:port")
    parser.add_argument("message", nargs="?", help="for example get_status")
    parser.add_argument("fields", nargs="?", default="{}", help="JSON object; default: {}")
    parser.add_argument(
        "--timeout-s", type=float, metavar="S", help="give up waiting after; default: never"
    )
    parser.add_argument("--json", action="store_true", help="on one line")
    add_session_options(parser)
    add_key_options(parser)
    parser.set_defaults(run=_run)


def build_request(tag: str, fields: str) -> Request[Any]:
    """Build a request from its tag and a JSON object; raises ConfigError that says what fits."""
    message = _BY_TAG.get(tag)
    if message is None:
        raise ConfigError(f"there is no message {tag!r}; gpuworker ask -l lists them")
    try:
        values = msgspec.json.decode(fields, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the fields of {tag} are not right: {error}") from error
    known = {field.name: field for field in msgspec.structs.fields(message)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"{tag} has no field {', '.join(unknown)}; it has {', '.join(known) or 'no fields'}"
        )
    missing = sorted(n for n, field in known.items() if field.required and n not in values)
    if missing:
        raise ConfigError(f"{tag} needs {', '.join(missing)}")
    decoded: dict[str, Any] = {}
    for name, raw in values.items():
        try:
            decoded[name] = msgspec.json.decode(raw, type=known[name].type)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{tag}.{name} is not right: {error}") from error
    return message(**decoded)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(arguments.json)
    if arguments.endpoint is None or arguments.message is None:
        raise ConfigError("give an endpoint and a message; gpuworker ask -h shows how")
    request = build_request(arguments.message, arguments.fields)
    is_question = type(request) in OBSERVER_REQUESTS
    if not is_question:
        check_free(arguments)
    with BlockingClient(
        arguments.endpoint,
        observe=is_question,
        epoch=None if is_question else arguments.epoch,
        client="gpuworker ask",
        keys=client_keys(arguments),
        timeout_s=arguments.timeout_s,
    ) as worker:
        reply = as_dict(worker.ask(request))
    if arguments.json:
        print_json(reply)
    else:
        print(json.dumps(reply, indent=2))
    return 0


def _list(as_json: bool) -> int:
    rows = [
        (tag, (message.__doc__ or "").splitlines()[0], _signature(message))
        for tag, message in _BY_TAG.items()
    ]
    if as_json:
        print_json([{"message": tag, "doc": doc, "fields": fields} for tag, doc, fields in rows])
        return 0
    width = max(len(tag) for tag, _, _ in rows)
    for tag, doc, fields in rows:
        print(f"{tag:{width}}  {doc}")
        if fields:
            print(f"{'':{width}}  fields: {', '.join(fields)}")
        print(f"{'':{width}}  reply:  {message_tag(REPLY_OF[_BY_TAG[tag]].__name__)}")
    return 0


def _signature(message: type[Request[Any]]) -> list[str]:
    return [
        field.name if field.required else f"[{field.name}]"
        for field in msgspec.structs.fields(message)
    ]
