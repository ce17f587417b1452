"""Campaign: many steps of a job in a world that changes, under a virtual clock. What `fusionllm simulate` prints.

On the path: Workload + Cluster + World -> **Campaign**. Each step is the planner's own replay of the stage programs
with the rates, speeds and jitter of then. A node with a stage that is lost ends the step: the others notice, plan anew
with the nodes that are there and the rates of now (speeds as known before), fetch what they did not hold, and go on
from the last checkpoint. Nodes that are back are used by the next plan. Nothing waits in real time and nothing is
random but what the seed says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import msgspec

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.program import Action
from fusionllm.schedule.pipeline import build_programs, pipeline_name
from fusionllm.schedule.placement import Cluster, Placement, Workload, build_models, link_rates, select_nodes
from fusionllm.schedule.planner import plan_placement
from fusionllm.schedule.timeline import replay
from fusionllm.sim.world import MAX_STEPS, World, WorldOptions, check_world

#: Losses without a finished checkpoint between them after which a job is said to get nowhere.
MAX_SETBACKS = 1000
#: A new plan while all goes well must be this much faster.
REPLAN_GAIN = 1.05


class Happening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At a virtual time and a step: a loss, a plan, or a wait, in words."""

    clock_s: float
    step: int
    what: str


class Campaign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated job.

    Attributes:
        clock_s: virtual seconds from the first step to the last. predicted_step_s: what the first plan promised.
        step_s: of each finished step that counted. redone: steps that were finished but lost to a setback.
        idle_s: virtual seconds without progress: steps cut short, noticing, fetching, waiting for nodes.
        plans: how many, the first one included. happenings: in order.
    """

    seed: int
    clock_s: float
    predicted_step_s: float
    step_s: tuple[float, ...]
    redone: int
    idle_s: float
    losses: int
    plans: int
    happenings: tuple[Happening, ...]

    @property
    def slowdown(self) -> float:
        """Virtual seconds over what the first plan promised for these steps."""
        return self.clock_s / (self.predicted_step_s * len(self.step_s))


def simulate(workload: Workload, cluster: Cluster, steps: int, seed: int, world: WorldOptions) -> Campaign:
    """Run ``steps`` steps.

    Raises:
        UserError: an option out of range. PlanError: no plan fits, and no node will come back to change that.
    """
    check_world(world)
    if not 1 <= steps <= MAX_STEPS or seed < 0:
        raise UserError(f"steps {steps}, seed {seed}; steps lie between 1 and {MAX_STEPS}, the seed is not negative")
    run = _Run(workload, World(cluster, world, seed))
    while len(run.done) < steps:
        run.step()
    return Campaign(
        seed=seed, clock_s=run.clock_s, predicted_step_s=run.predicted_s, step_s=tuple(run.done), redone=run.redone,
        idle_s=run.idle_s, losses=run.losses, plans=run.plans, happenings=tuple(run.happenings),
    )  # fmt: skip


class _Run:
    """The job: its plan, its clock and the steps done since the last checkpoint."""

    def __init__(self, workload: Workload, world: World) -> None:
        self.workload, self.world, self.options = workload, world, world.options
        self.clock_s = self.idle_s = 0.0
        self.done: list[float] = []
        self.redone = self.losses = self.plans = self.setbacks = 0
        self.happenings: list[Happening] = []
        best = plan_placement(workload, world.cluster)[0]
        self.predicted_s = best.step_s
        self._adopt(best.placement, "planned")

    def _tell(self, what: str) -> None:
        self.happenings.append(Happening(clock_s=self.clock_s, step=len(self.done), what=what))

    def _adopt(self, placement: Placement, why: str) -> None:
        self.placement = placement
        self.plans += 1
        name = pipeline_name(self.workload.pipeline, placement.depths)
        self.programs = build_programs(name, len(placement.nodes), self.workload.num_microbatches)
        names = [self.world.cluster.nodes[k].name for k in dict.fromkeys(placement.nodes)]
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        self._tell(f"{why}: {len(names)} nodes, {shown}")

    def step(self) -> None:
        """One step, or what a loss in it makes of it."""
        every, count = self.options.replan_every, len(self.done)
        if every and count and count % every == 0 and self.happenings[-1].step != count:
            self._replan_if_faster()
        seconds = self._step_s()
        lost_s = self.world.next_loss_s(self.placement.nodes)
        if lost_s <= self.clock_s + seconds:
            self._lose(lost_s)
            return
        self.clock_s += seconds
        self.done.append(seconds)
        if len(self.done) % self.options.checkpoint_every == 0:
            self.setbacks = 0
        self.world.advance(self.clock_s)

    def _step_s(self) -> float:
        slowness = [self.world.slowness(self.placement.nodes[p.stage_index]) for p in self.programs]

        def stretch(index: int, action: Action) -> float:
            computes = action.kind not in ("SEND_F", "SEND_B")
            return self.world.jitter() * (slowness[index] if computes else 1.0)

        models = build_models(self.workload, self.world.drifted(), self.placement)
        return replay(self.programs, *models, stretch).step_s

    def _lose(self, lost_s: float) -> None:
        """A node of the plan is gone: notice, go back to the checkpoint, plan anew, fetch."""
        self.losses += 1
        self.setbacks += 1
        before_s, self.clock_s = self.clock_s, lost_s
        gone = [index for _, index, there in self.world.advance(lost_s) if not there]
        gone_names = ", ".join(self.world.cluster.nodes[k].name for k in gone if k in self.placement.nodes)
        kept = len(self.done) // self.options.checkpoint_every * self.options.checkpoint_every
        self._tell(f"{gone_names} lost; back to step {kept}")
        self.redone += len(self.done) - kept
        del self.done[kept:]
        if self.setbacks > MAX_SETBACKS:
            raise PlanError(
                f"{MAX_SETBACKS} losses without a checkpoint between them; checkpoint more often than every "
                f"{self.options.checkpoint_every} steps, or plan on nodes that stay longer"
            )
        self.clock_s += self.options.detect_s
        self.world.advance(self.clock_s)
        self._plan_again()
        self.idle_s += self.clock_s - before_s

    def _plan_again(self) -> None:
        """With the nodes that are there; if that cannot be, wait for one to come back."""
        while True:
            try:
                placement = self._best_now()
            except PlanError as error:
                back_s = self.world.next_return_s()
                if back_s == math.inf:
                    raise PlanError(
                        f"after {len(self.done)} steps no plan is left, and no node comes back: {error}"
                    ) from None
                self._tell("no plan fits; waiting for a node")
                self.clock_s = back_s
                self.world.advance(back_s)
                continue
            self.clock_s += self._fetch_s(placement)
            self._adopt(placement, "planned anew")
            self.world.advance(self.clock_s)
            if all(self.world.present[k] for k in placement.nodes):
                return
            self._tell("a node of the new plan left while it was set up")

    def _best_now(self) -> Placement:
        there = [k for k, present in enumerate(self.world.present) if present]
        if not there:
            raise PlanError("all nodes are lost")
        best = plan_placement(self.workload, select_nodes(self.world.drifted(), there))[0].placement
        return msgspec.structs.replace(best, nodes=tuple(there[k] for k in best.nodes))

    def _replan_if_faster(self) -> None:
        placement, cluster = self._best_now(), self.world.drifted()
        name = pipeline_name(self.workload.pipeline, placement.depths)
        programs = build_programs(name, len(placement.nodes), self.workload.num_microbatches)
        now_s = replay(self.programs, *build_models(self.workload, cluster, self.placement)).step_s
        then_s = replay(programs, *build_models(self.workload, cluster, placement)).step_s
        if now_s < then_s * REPLAN_GAIN:
            return
        fetch_s = self._fetch_s(placement)
        self.clock_s += fetch_s
        self.idle_s += fetch_s
        self._adopt(placement, "rates have changed, planned anew")
        self.world.advance(self.clock_s)

    def _fetch_s(self, placement: Placement) -> float:
        """Until every node holds the state of its stages: what it did not hold, over its best link, all at once."""
        state = [0.0, *accumulate(self.workload.state_bytes)]
        held = _ranges(self.placement, len(self.workload.flops))
        rate = link_rates(self.world.drifted())
        longest = 0.0
        for node, ranges in _ranges(placement, len(self.workload.flops)).items():
            there = [k for k, present in enumerate(self.world.present) if present and k != node]
            best = max((float(rate[k, node]) for k in there), default=0.0)
            missing = sum(state[b] - state[a] for a, b in _without(ranges, held.get(node, [])))
            longest = max(longest, missing / best if best > 0 else 0.0)
        return longest


def _ranges(placement: Placement, num_ops: int) -> dict[int, list[tuple[int, int]]]:
    edges = [0, *placement.boundaries, num_ops]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for node, a, b in zip(placement.nodes, edges, edges[1:]):
        ranges.setdefault(node, []).append((a, b))
    return ranges


def _without(ranges: list[tuple[int, int]], held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Parts of ``ranges`` that lie in none of ``held``."""
    edges = sorted({edge for pair in (*ranges, *held) for edge in pair})
    parts = list(zip(edges, edges[1:]))
    starts = [a for a, _ in parts]

    def covers(pairs: list[tuple[int, int]]) -> set[int]:
        return {k for a, b in pairs for k in range(bisect_right(starts, a) - 1, bisect_right(starts, b - 1))}

    return [parts[k] for k in sorted(covers(ranges) - covers(held))]
