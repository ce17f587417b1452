"""World: what changes while a job runs: jitter, drift of rates and speeds, nodes that leave and come back.

On the path: WorldOptions + seed + virtual time -> factors and losses -> `sim.campaign`. Every source of chance has its
own stream, made of the seed and what it is for, so that one setting changes nothing of the others.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from fusionllm.errors import UserError
from fusionllm.schedule.placement import Cluster

#: Of jitter and drift: beyond it a rate is three times as high or low now and then, which no plan is for.
MAX_SIGMA = 1.0
MAX_WAIT_S = 1e9
MAX_STEPS = 1_000_000


class WorldOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much changes. Sigmas are those of logarithms: 0.1 is about 10 %.

    Attributes:
        jitter: of every computation and transfer, by itself.
        drift: of the rate between two sites; nodes' speeds drift half as much. drift_s: what it forgets over.
        loss_every_s: mean seconds until a node is lost, 0 for never. back_s: mean until it is back, 0 for never.
        detect_s: from a loss until the others know.
        checkpoint_every: steps; a loss takes the job back to the last one.
        replan_every: steps after which a plan for the rates of then is tried, 0 for only after a loss.
    """

    jitter: float = 0.05
    drift: float = 0.2
    drift_s: float = 600.0
    loss_every_s: float = 0.0
    back_s: float = 600.0
    detect_s: float = 10.0
    checkpoint_every: int = 50
    replan_every: int = 0


def check_world(world: WorldOptions) -> None:
    """Raises UserError for a number out of range, in the words of the command."""
    sigma, seconds, steps = " (0.05 is about 5 %)", " seconds", " steps"
    for flag, value, low, high, unit in (
        ("jitter", world.jitter, 0, MAX_SIGMA, sigma),
        ("drift", world.drift, 0, MAX_SIGMA, sigma),
        ("drift-time", world.drift_s, 1, MAX_WAIT_S, seconds),
        ("loss-every", world.loss_every_s, 0, MAX_WAIT_S, seconds),
        ("back", world.back_s, 0, MAX_WAIT_S, seconds),
        ("detect", world.detect_s, 0, MAX_WAIT_S, seconds),
        ("checkpoint-every", world.checkpoint_every, 1, MAX_STEPS, steps),
        ("replan-every", world.replan_every, 0, MAX_STEPS, steps),
    ):
        if not low <= value <= high:
            raise UserError(f"--{flag} is {value:g}; it must lie between {low} and {high:g}{unit}")


class World:
    """The state of all nodes and links at a virtual time that only goes forward."""

    def __init__(self, cluster: Cluster, options: WorldOptions, seed: int) -> None:
        self.cluster, self.options, self.now_s = cluster, options, 0.0
        count = len(cluster.nodes)
        sites = {site: k for k, site in enumerate(dict.fromkeys(node.site for node in cluster.nodes))}
        self.site = np.array([sites[node.site] for node in cluster.nodes])
        self._jitter, self._drift = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
        self._lives = [np.random.default_rng([seed, 2, k]) for k in range(count)]
        self._rates = self._drift.standard_normal((len(sites), len(sites)))
        self._speeds = self._drift.standard_normal(count)
        self.present = [True] * count
        self.turns_s = [self._life(k) for k in range(count)]

    def _life(self, index: int) -> float:
        """When a node that is there is lost, or one that is lost is back."""
        mean = self.options.loss_every_s if self.present[index] else self.options.back_s
        return self.now_s + float(self._lives[index].exponential(mean)) if mean > 0 else math.inf

    def advance(self, now_s: float) -> list[tuple[float, int, bool]]:
        """Go to a time. Returns (when, node, whether it is there now) of those that were lost or came back."""
        turned = []
        while (when := min(self.turns_s)) <= now_s:
            index = self.turns_s.index(when)
            self._drift_to(when)
            self.present[index] = not self.present[index]
            self.turns_s[index] = self._life(index)
            turned.append((when, index, self.present[index]))
        self._drift_to(now_s)
        return turned

    def _drift_to(self, now_s: float) -> None:
        """A random walk that is pulled back, so that the spread stays what the options say (Ornstein-Uhlenbeck)."""
        keep = math.exp(-(now_s - self.now_s) / self.options.drift_s)
        fresh = math.sqrt(max(0.0, 1 - keep * keep))
        self._rates = keep * self._rates + fresh * self._drift.standard_normal(self._rates.shape)
        self._speeds = keep * self._speeds + fresh * self._drift.standard_normal(self._speeds.shape)
        self.now_s = now_s

    def next_loss_s(self, nodes: tuple[int, ...]) -> float:
        """When the first of these nodes is lost."""
        return min(self.turns_s[k] for k in nodes)

    def next_return_s(self) -> float:
        return min((t for t, there in zip(self.turns_s, self.present) if not there), default=math.inf)

    def drifted(self) -> Cluster:
        """The cluster with the rates of now. Inside a site they do not drift."""
        factor = np.exp(self.options.drift * self._rates)
        np.fill_diagonal(factor, 1.0)
        rates = np.array(self.cluster.bandwidth_bytes_per_s, dtype=float) * factor[np.ix_(self.site, self.site)]
        return msgspec.structs.replace(self.cluster, bandwidth_bytes_per_s=tuple(map(tuple, rates.tolist())))

    def slowness(self, index: int) -> float:
        """How many times as long a node takes now."""
        return math.exp(self.options.drift / 2 * float(self._speeds[index]))

    def jitter(self) -> float:
        return math.exp(self.options.jitter * float(self._jitter.standard_normal()))
