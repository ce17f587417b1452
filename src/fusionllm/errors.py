"""The one tree of errors. Anything raised that is not in this tree is a bug of ours.

    FusionError
    |-- UserError            the config, a file, a flag or the model is not usable as given; exit code 2
    |   `-- CaptureError     the model cannot become an OpGraph; names the operator, the source line, the way out
    |-- PlanError            no plan fits; carries the binding constraint
    |-- GraphError           a graph breaks a rule of the IR (unknown operator, dangling value, wrong hash)
    |-- ProtocolError
    |   |-- LocalProtocolError    our side was about to break the protocol: a bug here
    |   `-- RemoteProtocolError   the peer broke it; the wire to that peer is closed
    |-- AdmissionError       the broker refused a node (token, version, identity)
    |-- LinkError
    |   |-- LinkClosed       ended on purpose, by either side
    |   `-- LinkBroken       ended by a failure that outlasted the resume window, or by a restarted peer
    |-- NodeLost             a node left or died; carries its name
    |-- StallError           a wait met its deadline; says who waits for whom
    `-- CheckpointError      a checkpoint is missing, torn or of another model

Messages say what happened, the values with units, what was needed, and what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class FusionError(Exception):
    """Base of every error this package raises on purpose. ``exit_code`` is what the command line returns."""

    exit_code = 1


class UserError(FusionError):
    """The input (config, file, flag, model) must be changed by the person who gave it."""

    exit_code = 2


class CaptureError(UserError):
    """The model cannot be captured as given."""


class PlanError(FusionError):
    """No plan satisfies the constraints; the message names the binding one."""


class GraphError(FusionError):
    """A graph, plan or program breaks a rule of the IR."""


class ProtocolError(FusionError):
    """One side of a conversation broke its rules."""


class LocalProtocolError(ProtocolError):
    """This side was about to break the protocol: a bug here, not at the peer."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the receiver closes the wire to it."""


class AdmissionError(FusionError):
    """The broker refused a node: bad or expired token, other protocol version, or an identity already taken."""


class LinkError(FusionError):
    """A link between two machines ended."""


class LinkClosed(LinkError):
    """Ended on purpose by one side."""


class LinkBroken(LinkError):
    """Ended by a failure that outlasted the resume window, or because the peer restarted."""


class NodeLost(FusionError):
    """A node left or died."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"node {node} lost: {reason}")
        self.node = node
        self.reason = reason


class StallError(FusionError):
    """A wait met its deadline; the message says who waits for whom, for what, and since when."""


class CheckpointError(FusionError):
    """A checkpoint is missing, torn, or belongs to another model."""


def near_names(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known names nearest to one that is not known, whatever their case; none when no name is near."""
    folded = {one.lower(): one for one in known}
    return [folded[one] for one in difflib.get_close_matches(name[:100].lower(), folded, count)]


def near_hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What a sentence about a name that is not known ends in: the nearest, or nothing."""
    near = near_names(name, known)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def known_names(name: str, known: Collection[str], prefix: str = "") -> str:
    """The nearest of the known names, if one is near, and all of them; ``prefix`` stands before the nearest."""
    near = near_names(name, known)
    return f"{f'did you mean {prefix}{near[0]}? ' if near else ''}known: {', '.join(known)[:400]}"
