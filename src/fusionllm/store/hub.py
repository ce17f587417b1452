"""The hub that tokenizers and datasets by name come from, as far as whether it can be asked.

On the path, aside: a name -> the hub's own libraries, which keep what they fetched in a cache.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from fusionllm.errors import UserError, near_hint

#: Ids of the hub that have no owner, of well-known tokenizers.
OWNERLESS = (
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt", "bert-base-uncased", "bert-base-cased",
    "bert-large-uncased", "bert-large-cased", "distilbert-base-uncased", "roberta-base", "roberta-large",
    "xlm-roberta-base", "t5-small", "t5-base", "t5-large", "albert-base-v2", "xlnet-base-cased",
)  # fmt: skip


def check_hub_id(what: str, name: str, built_in: tuple[str, ...]) -> None:
    """Refuse a name that is no id of the hub, without asking it. Raises UserError with the nearest known one."""
    if "/" not in name and name not in OWNERLESS:
        raise UserError(
            f"{what} {name[:80]!r} is neither built in ({', '.join(built_in)}), nor a local file or folder, nor an id "
            f"of the hub, which is written OWNER/NAME{near_hint(name, (*built_in, *OWNERLESS))}"
        )


@contextmanager
def asking_hub() -> Iterator[None]:
    """Where the hub's address is not known, its libraries look into their cache alone, else they retry long."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _is_known(urlsplit(constants.ENDPOINT).hostname)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_known(host: str | None) -> bool:
    """Whether a name has an address here; a proxy may know it where we do not."""
    try:
        return bool(getproxies()) or bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False
