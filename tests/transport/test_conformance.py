"""Every transport passes the kit."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from tests.kits.transport_kit import CASES, CHECKS


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("case", "new_loop"),
    [*((case, asyncio.new_event_loop) for case in CASES), ("tls", uvloop.new_event_loop)],
)
def test_transport(case, new_loop, check):
    async def run() -> None:
        net = CASES[case]()
        try:
            await asyncio.wait_for(CHECKS[check](net), 60)
        finally:
            await net.close()

    loop = new_loop()
    try:
        loop.run_until_complete(run())
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
