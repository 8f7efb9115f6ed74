"""Layer 5. `gpuworker watch`: the events of a running worker, one per line."""

from __future__ import annotations

import argparse
import asyncio
from typing import get_args

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import print_json
from gpuworker.cli.session import add_key_options, client_keys
from gpuworker.events import TOPIC_OF, Topic
from gpuworker.ipc.subscriber import Gap, watch
from gpuworker.messages import as_dict, message_tag

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "watch",
        help="events of a running worker, one per line",
        description=(
            "Print how a worker is, then what changes, until it goes away or you interrupt.\n"
            "Watching needs no session and disturbs nobody."
        ),
        examples=(
            "  gpuworker watch ipc:///tmp/w/rank0\n"
            "  gpuworker watch ipc:///tmp/w/rank0 --topics state health --json"
        ),
    )
    parser.add_argument("endpoint", help="ipc:///path or tcp://host:port")
    parser.add_argument(
        "--topics", nargs="+", choices=get_args(Topic), default=(), help="default: all"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_key_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    asyncio.run(_watch(arguments))
    return 0


async def _watch(arguments: argparse.Namespace) -> None:
    keys = client_keys(arguments)
    async with watch(arguments.endpoint, arguments.topics, keys=keys) as heard:
        async for item in heard:
            if isinstance(item, Gap):
                facts = {"topic": item.topic, "event": "gap", "num_missed": item.num_missed}
            else:
                facts = {
                    "topic": TOPIC_OF[type(item.event)],
                    "event": message_tag(type(item.event).__name__),
                    "seq": item.seq,
                    "snapshot": item.is_snapshot,
                    **as_dict(item.event),
                }
            if arguments.json:
                print_json(facts)
            else:
                topic, event = facts.pop("topic"), facts.pop("event")
                rest = " ".join(f"{name}={_text(value)}" for name, value in facts.items())
                print(f"{topic:8} {event} {rest}", flush=True)


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text.isprintable() else ascii(text)  # a line each, whatever a worker says
