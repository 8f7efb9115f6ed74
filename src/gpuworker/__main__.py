"""Layer 5. `python -m gpuworker`."""

from __future__ import annotations

import sys

from gpuworker.cli import main

if __name__ == "__main__":
    sys.exit(main())
