"""Who is there, as a pure machine: admission by token, one machine per identity, idle nodes leased to jobs.

The broker's shell tells it what happened and when; it answers who is let in, who gets which lease.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

import msgspec

from fusionllm.errors import AdmissionError, RemoteProtocolError
from fusionllm.protocol.messages import NAME, Join, Offer, check_version


class Member(msgspec.Struct, frozen=True):
    """A machine that was let in. ``host``, ``port``: where it listens for tensors, 0 before it said so."""

    name: str
    role: str
    fence: str
    backend: str
    opset: int
    host: str = ""
    port: int = 0
    job: str = ""
    offer: Offer | None = None


class Membership:
    """The roster of one broker.

    Args:
        token: what a newcomer must show. expires_s: on the clock of ``now_s``, when it stops working.

    Attributes:
        members: who is here, by name. fences: of all nodes that ever were.
    """

    def __init__(self, token: str, expires_s: float) -> None:
        self._token, self._expires_s = token, expires_s
        self.members: dict[str, Member] = {}
        self.fences: set[str] = set()

    def admit(self, join: Join, now_s: float) -> Member:
        """Let a machine in. Raises AdmissionError with a sentence that the newcomer is shown."""
        try:
            check_version(join.version)
        except RemoteProtocolError as error:
            raise AdmissionError(str(error)) from None
        if not hmac.compare_digest(join.token.encode(), self._token.encode()):
            raise AdmissionError("wrong join token; copy the ticket the broker prints now, it changes at every start")
        if now_s > self._expires_s:
            raise AdmissionError(
                "the join token has expired; restart the broker (--token-hours sets how long it lasts)"
            )
        if NAME.fullmatch(join.name) is None:
            raise AdmissionError(f"name {join.name[:80]!r}: use 1 to 63 letters, digits, dots, dashes or underscores")
        if join.fence and NAME.fullmatch(join.fence) is None:
            raise AdmissionError(f"fence {join.fence[:80]!r}: use 1 to 63 letters, digits, dots, dashes or underscores")
        if join.name in self.members or join.name == "broker":
            raise AdmissionError(f"a machine named {join.name!r} is already here; choose another with --name")
        member = Member(join.name, join.role, join.fence, join.backend, join.opset)
        self.members[join.name] = member
        if join.role == "node" and join.fence:
            self.fences.add(join.fence)
        return member

    def listening(self, name: str, host: str, port: int, offer: Offer | None = None) -> None:
        """A machine says where it takes tensors, a node also what it can do."""
        self.members[name] = msgspec.structs.replace(self.members[name], host=host, port=port, offer=offer)

    def leave(self, name: str) -> Member | None:
        return self.members.pop(name, None)

    def idle_nodes(self) -> list[Member]:
        """Nodes that could take a stage, in the order they came."""
        return [m for m in self.members.values() if m.role == "node" and m.port and not m.job]

    def busy_nodes(self) -> list[Member]:
        """Nodes that have a job."""
        return [m for m in self.members.values() if m.role == "node" and m.job]

    def lease(self, owner: str, job: str, num_nodes: int, *, every: bool = False) -> list[Member] | None:
        """Take ``num_nodes`` idle nodes for a job, those of one fence side by side; None when too few are idle.

        With ``every`` all that are idle, for a planner to choose from. Nodes in the owner's fence come first, then the
        other fences by name, so neighbouring stages share a fence.
        """
        idle = self.idle_nodes()
        if len(idle) < num_nodes:
            return None
        home = self.members[owner].fence
        chosen = sorted(idle, key=lambda m: (m.fence != home, m.fence, m.name))[: None if every else num_nodes]
        leased = [msgspec.structs.replace(m, job=job) for m in chosen]
        self.members.update({m.name: m for m in leased})
        self.members[owner] = msgspec.structs.replace(self.members[owner], job=job)
        return leased

    def spare(self, job: str, names: Iterable[str]) -> None:
        """The job does without these nodes; they are idle again."""
        spared = [self.members[n] for n in names if n in self.members and self.members[n].job == job]
        self.members.update({member.name: msgspec.structs.replace(member, job="") for member in spared})

    def holds(self, job: str, names: Iterable[str]) -> bool:
        """Whether all of these machines are still here and lent to this job."""
        return all(name in self.members and self.members[name].job == job for name in names)

    def release(self, job: str) -> None:
        """The job is over; its machines are idle again."""
        self.members.update({m.name: msgspec.structs.replace(m, job="") for m in self.members.values() if m.job == job})
