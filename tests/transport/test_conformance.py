"""Every transport passes the kit."""

from __future__ import annotations

import asyncio

import pytest
from tests.kits.transport_kit import CASES, CHECKS


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_transport(case, check):
    async def run() -> None:
        net = CASES[case]()
        try:
            await asyncio.wait_for(CHECKS[check](net), 60)
        finally:
            await net.close()

    asyncio.run(run())
