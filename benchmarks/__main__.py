"""Run every benchmark, one after the other; the lines of all go to stdout (and to --output)."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.report import benchmark_parser

BENCHMARKS = (
    "dispatch",
    "step_payload",
    "ipc_roundtrip",
    "health",
    "step_pipeline",
    "steplog",
    "bring_up",
    "sleep_wake",
    "generation",
)
_NEED_A_MODEL = ("bring_up", "sleep_wake", "generation")


def main() -> int:
    """Run all benchmarks and return 1 when one of them failed."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--model", metavar="DIR", help="default: SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    status = 0
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--quick"] if arguments.quick else []
        command += ["--output", str(arguments.output)] if arguments.output is not None else []
        if arguments.model is not None and name in _NEED_A_MODEL:
            command += ["--model", arguments.model]
        status |= subprocess.run(command, check=False).returncode != 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
