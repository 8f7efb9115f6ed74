"""Layer 5. The command line: one module per verb, all on ask, submit and the engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
import traceback
from collections.abc import Sequence
from os import environ

from gpuworker import __version__
from gpuworker.cli import (
    ask,
    demo,
    docs,
    doctor,
    generate,
    keygen,
    record,
    replay,
    serve,
    tables,
    watch,
)
from gpuworker.errors import ClientError, ConfigError, WorkerError

__all__ = ["main"]

_DESCRIPTION = """\
The GPU half of an LLM inference engine, as an actor with an explicit lifecycle.

Start with:
  gpuworker demo                                    the whole lifecycle on a real model
  gpuworker doctor                                  what this machine has
  gpuworker generate DIR "Once upon a time"         text from a model directory
  gpuworker serve --model DIR --endpoint ipc:///tmp/w/rank0
  gpuworker ask ipc:///tmp/w/rank0 get_status       talk to it
"""
_EPILOG = """\
exit status: 0 done; 1 the worker refused or failed; 2 usage or configuration; 130 interrupted.
GPUWORKER_TRACEBACK=1 shows where an error came from.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuworker",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpuworker {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in (
        demo,
        serve,
        generate,
        ask,
        watch,
        record,
        replay,
        keygen,
        tables,
        docs,
        doctor,
    ):
        verb.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status; errors are a line on stderr, not a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except (WorkerError, ClientError) as error:
        return _fail(error, 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has seen enough
        return 0
    return status


def _fail(error: WorkerError | ClientError, status: int) -> int:
    if environ.get("GPUWORKER_TRACEBACK"):
        traceback.print_exception(error)
    name = error.code if isinstance(error, WorkerError) else type(error).__name__
    print(f"gpuworker: {name}: {error}", file=sys.stderr)
    return status
