"""What all tests share: the exceptions to "every warning is an error", and no deadline for a single example."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

# An example's time is the machine's, which may be busy; how long all may take is the runner's to say.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

#: Before Python 3.11 asyncio's own TLS transport forgets to close itself after a broken wire.
_OLD_ASYNCIO = "ignore:Exception ignored in.*_SSLProtocolTransport:pytest.PytestUnraisableExceptionWarning"


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info < (3, 11):
        config.addinivalue_line("filterwarnings", _OLD_ASYNCIO)
