"""Layer 5. `gpuworker replay`: a step log against a worker that is alone."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import print_json, working
from gpuworker.steplog import LOGPROB_TOLERANCE, ReplayReport, replay

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "replay",
        help="send a step log to a lone worker and compare its answers",
        description=(
            "Start a worker with the recorded configuration, send it the recorded requests one\n"
            "after the other and compare: states, epochs, refusals and sampled tokens exactly,\n"
            "log-probabilities within a tolerance, failures by their code. No time is compared.\n\n"
            "exit status: 0 everything is equal; 1 something differs; 2 the log is not usable."
        ),
        examples=(
            "  gpuworker replay monday.steps\n"
            "  gpuworker replay monday.steps --model ~/models/other --json\n"
            "  gpuworker replay monday.steps --to 100        the first hundred steps only"
        ),
    )
    parser.add_argument("log", type=Path, metavar="FILE", help="written by gpuworker record")
    parser.add_argument(
        "--model", metavar="DIR_OR_REPO", help="instead of the recorded directory or repo id"
    )
    parser.add_argument(
        "--from",
        dest="first_step",
        type=int,
        default=1,
        metavar="N",
        help="compare from the N-th step of the log on; those before are carried out",
    )
    parser.add_argument(
        "--to", dest="last_step", type=int, metavar="N", help="end after the N-th step"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=LOGPROB_TOLERANCE,
        metavar="NATS",
        help="of log-probabilities; 0 compares bits and ranks, too; default: %(default)g",
    )
    parser.add_argument(
        "--salvage", action="store_true", help="go past damage in the middle of the log"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with working(f"replaying {arguments.log}", quiet=arguments.json):
        report = asyncio.run(
            replay(
                arguments.log,
                model=arguments.model,
                tolerance=arguments.tolerance,
                first_step=arguments.first_step,
                last_step=arguments.last_step,
                salvage=arguments.salvage,
            )
        )
    if arguments.json:
        print_json(msgspec.to_builtins(report))
    else:
        print("\n".join(_lines(report)))
    return 0 if report.num_different == 0 else 1


def _lines(report: ReplayReport) -> list[str]:
    lines = [
        f"requests   {report.num_requests} sent again, {report.num_skipped} skipped",
        f"compared   {report.num_compared} answers; {report.num_compared_steps} steps with "
        f"{report.num_tokens} tokens",
    ]
    if report.num_unanswered:
        lines.append(f"unanswered {report.num_unanswered} requests, sent and not compared")
    lines.append(f"log        {report.log_end}")
    if report.torn_bytes:
        lines.append(f"torn       {report.torn_bytes} bytes at the end of the log")
    if report.num_skipped_bytes:
        lines.append(f"damaged    {report.num_skipped_bytes} bytes left out")
    lines += [f"origin     {change}" for change in report.origin_changes]
    first = report.first
    if first is None:
        return [*lines, "equal      every answer is the recorded one"]
    where = f"request {first.index}, {first.message}"
    if first.step is not None:
        where += f", step {first.step} of the log, step id {first.step_id}"
    if first.mismatch.row is not None:
        where += f", row {first.mismatch.row}"
    return [
        *lines,
        f"different  {report.num_different} answers; the first: {where}",
        f"           {first.mismatch.what}: expected {first.mismatch.expected}, "
        f"got {first.mismatch.got}",
    ]
