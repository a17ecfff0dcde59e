"""An independent reference for the simulator: many steps unrolled, every node an event on a heap, the period read off the end.

It shares no code with the product: no max-plus algebra, no step map, only queues, dependencies and a clock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from fractions import Fraction

from qsync_core.ir.dfg import GlobalDfg, Phase, Resource

WINDOW = 120
"""Steps over which the rate is taken: a multiple of every short cycle length."""


class _Machine:
    def __init__(self, dfg: GlobalDfg, steps: int) -> None:
        self.dfg, self.steps = dfg, steps
        self.clock = 0
        self.events: list[tuple[int, int, object]] = []
        self.order = 0
        self.queues: dict[object, deque[tuple[int, int, int]]] = defaultdict(deque)
        self.busy: dict[object, bool] = defaultdict(bool)
        self.done: dict[tuple[int, int, int], int] = {}
        self.left = {(g, k): len(group.nodes) for g, group in enumerate(dfg.groups) for k in range(steps)}
        self.buckets = [n.bucket for n in dfg.groups[0].nodes if n.phase is Phase.COMMUNICATION]
        self.meeting = deque((k, position) for k in range(steps) for position in range(len(self.buckets)))
        self.talking = False
        self.comm_nodes = [[n.node_id for n in group.nodes if n.phase is Phase.COMMUNICATION] for group in dfg.groups]
        for k in range(steps):
            for g, group in enumerate(dfg.groups):
                for node in group.nodes:
                    if node.phase is not Phase.COMMUNICATION:
                        self.queues[self.resource(g, node.resource)].append((g, k, node.node_id))

    def resource(self, g: int, resource: Resource) -> object:
        return (g, "host") if self.dfg.groups[g].synchronous else (g, str(resource))

    def after(self, delay: int, what: object) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.clock + delay, self.order, what))

    def may_start(self, g: int, k: int, node_id: int) -> bool:
        group = self.dfg.groups[g]
        node = group.nodes[node_id]
        if any((g, k, dep) not in self.done for dep in node.deps):
            return False
        on_host = group.synchronous or node.resource is Resource.DISPATCH
        return not (group.sync_per_step and on_host and k > 0 and self.left[g, k - 1] > 0)

    def start_what_can(self) -> None:
        for resource, queue in self.queues.items():
            if queue and not self.busy[resource] and self.may_start(*queue[0]):
                g, k, node_id = queue.popleft()
                self.busy[resource] = True
                self.after(self.dfg.groups[g].nodes[node_id].duration_ns, (resource, g, k, node_id))
        if self.meeting and not self.talking:
            k, position = self.meeting[0]
            nodes = [group.nodes[ids[position]] for group, ids in zip(self.dfg.groups, self.comm_nodes, strict=True)]
            if all((g, k, dep) in self.done for g, node in enumerate(nodes) for dep in node.deps):
                self.meeting.popleft()
                self.talking = True
                self.after(max(node.duration_ns for node in nodes), (k, position))

    def finish(self, g: int, k: int, node_id: int) -> None:
        self.done[g, k, node_id] = self.clock
        self.left[g, k] -= 1

    def run(self) -> None:
        self.start_what_can()
        while self.events:
            self.clock = self.events[0][0]
            while self.events and self.events[0][0] == self.clock:
                what = heapq.heappop(self.events)[2]
                if len(what) == 4:
                    resource, g, k, node_id = what
                    self.busy[resource] = False
                    self.finish(g, k, node_id)
                else:
                    k, position = what
                    self.talking = False
                    for g, ids in enumerate(self.comm_nodes):
                        self.finish(g, k, ids[position])
            self.start_what_can()


def reference_period(dfg: GlobalDfg, warm_up: int = 40) -> Fraction:
    """The steady-state period: the fastest-growing completion time of any node, over the last steps of a long run."""
    last = warm_up + WINDOW - 1
    machine = _Machine(dfg, last + 1)
    machine.run()
    assert not any(machine.left.values()), "the reference got stuck"
    rates = [
        Fraction(machine.done[g, last, node.node_id] - machine.done[g, last - WINDOW, node.node_id], WINDOW)
        if last - WINDOW >= 0
        else Fraction(0)
        for g, group in enumerate(dfg.groups)
        for node in group.nodes
    ]
    return max(rates, default=Fraction(0))
