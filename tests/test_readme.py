"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuworker.ipc import default_endpoint, serve
from gpuworker.testing import fake_worker

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _run(code: str, argument: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, argument],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_are_two_blocks() -> None:
    assert len(BLOCKS) == 2


def test_the_embedded_block_generates(tiny_model: Path) -> None:
    assert _run(BLOCKS[0], str(tiny_model)).strip()


async def test_the_client_block_is_refused_as_it_says() -> None:
    endpoint = default_endpoint()
    async with fake_worker() as worker:
        ready = asyncio.Event()
        server = asyncio.create_task(serve(worker, endpoint, on_ready=lambda _: ready.set()))
        await ready.wait()
        output = await asyncio.to_thread(_run, BLOCKS[1], endpoint)
        server.cancel()
        await asyncio.wait([server])
    assert output == "uninit\nuninit accepts init_device, drop_requests, shutdown\n"


@pytest.mark.parametrize("path", re.findall(r"\]\(([A-Za-z][^)#:]*)\)", README))
def test_a_link_of_the_readme_leads_somewhere(path: str) -> None:
    assert (Path(__file__).parents[1] / path).exists()
