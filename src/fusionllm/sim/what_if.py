"""What if: a cluster with one thing changed, from a sentence.

    link home-lab=1Gbps        link home-lab=1Gbps 5ms      the link between two fences or nodes, both directions
    add 2x RTX 4090 in fence home                           more nodes of a known device
    without home                                            a fence or a node left out

On the path: ClusterSpec -> **ClusterSpec** -> planner.
"""

from __future__ import annotations

import re

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.sim.cluster import ClusterLink, ClusterSpec, Node, check_spec, node_names
from fusionllm.units import parse_bandwidth_bytes_per_s, parse_duration_s

_ADD = re.compile(r"add (\d{1,4})\s?x (.+) in fence (.+)")
_LINK = re.compile(r"link (.+)=\s*([0-9.]+\s*[A-Za-z/]+)(?:\s+([0-9.]+\s*[A-Za-z]+))?")
_WITHOUT = re.compile(r"without (.+)")


def change(spec: ClusterSpec, text: str) -> ClusterSpec:
    """The cluster with the change of ``text``. Raises UserError for a sentence or a name that is not known."""
    sentence = text.strip()
    if match := _ADD.fullmatch(sentence):
        count, device, fence = match.groups()
        changed = msgspec.structs.replace(spec, node=(*spec.node, Node(fence=fence, device=device, count=int(count))))
    elif match := _LINK.fullmatch(sentence):
        changed = _change_link(spec, *match.groups())
    elif match := _WITHOUT.fullmatch(sentence):
        changed = _leave_out(spec, match[1])
    else:
        raise UserError(
            f"what-if {text[:120]!r}: write it like 'link home-lab=1Gbps', 'add 2x RTX 4090 in fence home' "
            "or 'without home'"
        )
    check_spec(changed)
    return changed


def _change_link(spec: ClusterSpec, ends: str, bandwidth: str, latency: str | None) -> ClusterSpec:
    parse_bandwidth_bytes_per_s(bandwidth)
    parse_duration_s(latency or "1 ms")
    known = {*(fence.name for fence in spec.fence), *node_names(spec)}
    splits = [(ends[:i].strip(), ends[i + 1 :].strip()) for i, c in enumerate(ends) if c == "-"]
    pairs = [pair for pair in splits if known.issuperset(pair)]
    if not pairs:
        a, b = next((pair for pair in splits if known.intersection(pair)), splits[0] if splits else (ends, ""))
        wrong = next(name for name in (a, b) if name not in known)
        raise UserError(f"what-if link {ends[:120]!r}: no fence or node {wrong!r}; {known_names(wrong, sorted(known))}")
    a, b = pairs[0]
    if a == b and a in {fence.name for fence in spec.fence}:
        fences = tuple(
            msgspec.structs.replace(f, bandwidth=bandwidth, latency=latency or f.latency) if f.name == a else f
            for f in spec.fence
        )
        return msgspec.structs.replace(spec, fence=fences)
    before = next((link for link in reversed(spec.link) if {link.a, link.b} == {a, b}), None)
    usual = before.latency if before else spec.otherwise.latency if spec.otherwise else "10 ms"
    link = ClusterLink(a=a, b=b, bandwidth=bandwidth, latency=latency or usual)
    return msgspec.structs.replace(spec, link=(*spec.link, link))


def _leave_out(spec: ClusterSpec, name: str) -> ClusterSpec:
    nodes: list[Node] = []
    names = iter(node_names(spec))
    for entry in spec.node:  # the others keep the names they had
        mine = [next(names) for _ in range(entry.count)]
        kept = [other for other in mine if name not in (other, entry.fence)]
        nodes += [msgspec.structs.replace(entry, name=other, count=1) for other in kept]
    if sum(node.count for node in nodes) == sum(node.count for node in spec.node):
        known = sorted({*(fence.name for fence in spec.fence), *node_names(spec)})
        raise UserError(f"what-if without {name[:80]!r}: no such fence or node; {known_names(name, known)}")
    return msgspec.structs.replace(spec, node=tuple(nodes))
