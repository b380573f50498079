r"""How long many workers take to score many images, by arithmetic and by a simulation.

A file of :math:`m` images is computed in :math:`c = m / \text{rate}` seconds. A worker fails at
random moments, :math:`\varphi` times in a second of computing. Then it loses its file and starts
again in :math:`s` seconds, so a file takes

.. math:: E = (e^{\varphi c} - 1) (1 / \varphi + s + r)

seconds of a worker on average, and :math:`c` where nothing fails, with :math:`r` seconds for
reading a file while all workers read. A worker reads one file ahead while it computes another. A
failure loses both, so a file is read :math:`1 + 2 (e^{\varphi c} - 1)` times. The longest of three
times decides: a worker's share of the files times :math:`E`, a node's share of the bytes over its
network, and all bytes over what the storage gives.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, replace

__all__ = ["Cluster", "Plan", "least_nodes", "plan", "simulate"]


@dataclass(frozen=True)
class Cluster:
    """What has to be done, and by what.

    Attributes:
        images: Number of images.
        files: Number of files, which hold equally many of them.
        size: Bytes of an image, as it is stored.
        rate: Images a second that one worker computes, while nothing else holds it up.
        workers: Number of workers on a node: one for a GPU, or for some cores of a CPU.
        nodes: Number of nodes.
        network: Bytes a second that a node can read.
        storage: Bytes a second that the storage gives to all nodes together.
        price: What a node costs in an hour.
        start: Seconds in which a worker starts.
        spread: Standard deviation of the time that a file takes over its mean.
        failures: How often a worker fails in an hour of computing.
    """

    images: int
    files: int
    size: float
    rate: float
    workers: int
    nodes: int
    network: float
    storage: float
    price: float = 0.0
    start: float = 0.0
    spread: float = 0.0
    failures: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds in which a worker computes a file."""
        return self.images / self.files / self.rate

    @property
    def bytes_of_a_file(self) -> float:
        return self.images / self.files * self.size


@dataclass(frozen=True)
class Plan:
    """What it takes.

    Attributes:
        hours: From the start of the workers to the last answer.
        busy: How many hours each of ``"compute"``, ``"node network"`` and ``"storage"`` is busy.
        limit: Which of the three is busy longest.
        nodes: Number of nodes.
        cost: What the nodes cost for so long.
    """

    hours: float
    busy: dict[str, float]
    nodes: int
    cost: float

    @property
    def limit(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


def plan(cluster: Cluster) -> Plan:
    """The arithmetic: hours, what limits them, and the cost."""
    c, all_workers = cluster.computing, cluster.workers * cluster.nodes
    together = min(cluster.network / cluster.workers, cluster.storage / all_workers)
    first = cluster.bytes_of_a_file / together
    exponent = cluster.failures / 3600 * c
    lost = math.expm1(exponent)
    mean = (c * lost / exponent if exponent else c) + lost * (cluster.start + first)
    read = cluster.images * cluster.size * (1 + 2 * lost)
    busy = {
        "compute": math.ceil(cluster.files / all_workers) * mean,
        "node network": read / cluster.nodes / cluster.network,
        "storage": read / cluster.storage,
    }
    # Nothing is computed while the first file is read, and nothing is read during the last one.
    ends = {name: took + (first if name == "compute" else c) for name, took in busy.items()}
    hours = (cluster.start + max(ends.values())) / 3600
    shown = {name: took / 3600 for name, took in busy.items()}
    return Plan(hours, shown, cluster.nodes, cluster.nodes * cluster.price * hours)


def least_nodes(cluster: Cluster, hours: float) -> Plan:
    """The plan with the fewest nodes that are done in so many hours.

    Raises:
        ValueError: No number of nodes is: the storage, or one file, takes longer.
    """
    most = math.ceil(cluster.files / cluster.workers)  # more than one worker for a file do not help
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if plan(replace(cluster, nodes=middle)).hours <= hours:
            high = middle
        else:
            low = middle + 1
    found = plan(replace(cluster, nodes=low))
    if found.hours > hours:
        raise ValueError(
            f"no number of nodes is done in {hours:g} hours: {low} take {found.hours:.3g}, and "
            f"what limits them is {found.limit}"
        )
    return found


def simulate(cluster: Cluster, seed: int = 0) -> float:
    """Hours from the start to the last answer, of one run of a simulation of discrete events."""
    return _Run(cluster, seed).seconds() / 3600


class _Node:
    """The readers of a node, who all read equally fast, so that one clock counts their bytes."""

    def __init__(self) -> None:
        self.clock = 0.0  # bytes that somebody who always read would have
        self.readers: dict[int, float] = {}  # for each worker the clock at its file's end
        self.ends: list[tuple[float, int]] = []

    def begin(self, worker: int, size: float) -> None:
        self.readers[worker] = self.clock + size
        heapq.heappush(self.ends, (self.readers[worker], worker))

    def next(self) -> tuple[float, int] | None:
        """The clock when somebody has read its file, and who; files given up are passed over."""
        while self.ends and self.readers.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)
        return self.ends[0] if self.ends else None


class _Run:
    """One run: workers take files, read them from shared storage, compute them and fail."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.now, self.waiting, self.finished = 0.0, cluster.files, 0
        count = cluster.workers * cluster.nodes
        self.nodes = [_Node() for _ in range(cluster.nodes)]
        self.ready, self.computes = [False] * count, [False] * count
        self.idle: set[int] = set()  # who has started and found no file left
        # When a worker starts, finishes a file, or fails.
        self.events = [(cluster.start, worker, "starts") for worker in range(count)]

    def seconds(self) -> float:
        while self.finished < self.cluster.files:
            self._step()
        return self.now

    def _step(self) -> None:
        """Go on to what happens next: a file is read, or an event is due."""
        reading = sum(len(node.readers) for node in self.nodes)
        soonest, where = math.inf, None
        rates = [self._rate(node, reading) for node in self.nodes]
        for node, rate in zip(self.nodes, rates, strict=True):
            top = node.next()
            if top is not None and (after := (top[0] - node.clock) / rate) < soonest:
                soonest, where = max(after, 0.0), node
        due = self.events[0][0] if self.events else math.inf
        is_read = self.now + soonest <= due
        passed = soonest if is_read else due - self.now
        for node, rate in zip(self.nodes, rates, strict=True):
            node.clock += rate * passed
        self.now += passed
        if is_read:
            assert where is not None
            worker = heapq.heappop(where.ends)[1]
            del where.readers[worker]
            self.ready[worker] = True
        else:
            _, worker, what = heapq.heappop(self.events)
            self._happens(worker, what)
            if what == "fails":  # others may have waited for the files that it gives back
                for other in sorted(self.idle):
                    self._go_on(other)
                return
        self._go_on(worker)

    def _rate(self, node: _Node, reading: int) -> float:
        if not node.readers:
            return 0.0
        return min(self.cluster.network / len(node.readers), self.cluster.storage / reading)

    def _happens(self, worker: int, what: str) -> None:
        if what == "finishes":
            self.finished += 1
            self.computes[worker] = False
        if what == "fails":
            # The file that is computed, and the one that is read or has been read ahead.
            reads = self._node(worker).readers.pop(worker, None) is not None
            self.waiting += 1 + (reads or self.ready[worker])
            self.ready[worker] = self.computes[worker] = False
            heapq.heappush(self.events, (self.now + self.cluster.start, worker, "starts"))

    def _go_on(self, worker: int) -> None:
        """Compute what is read, and read ahead what waits."""
        if self.ready[worker] and not self.computes[worker]:
            self.ready[worker], self.computes[worker] = False, True
            takes, fails = self._takes(), self._fails()
            event = (takes, "finishes") if takes <= fails else (fails, "fails")
            heapq.heappush(self.events, (self.now + event[0], worker, event[1]))
        node = self._node(worker)
        if self.waiting and not self.ready[worker] and worker not in node.readers:
            self.waiting -= 1
            node.begin(worker, self.cluster.bytes_of_a_file)
        busy = self.computes[worker] or self.ready[worker] or worker in node.readers
        (self.idle.discard if busy else self.idle.add)(worker)

    def _node(self, worker: int) -> _Node:
        return self.nodes[worker % self.cluster.nodes]

    def _takes(self) -> float:
        """A file's seconds of computing, lognormal around the mean."""
        variance = math.log1p(self.cluster.spread**2)
        if variance == 0:
            return self.cluster.computing
        middle = math.log(self.cluster.computing) - variance / 2
        return self.random.lognormvariate(middle, math.sqrt(variance))

    def _fails(self) -> float:
        rate = self.cluster.failures / 3600
        return self.random.expovariate(rate) if rate else math.inf
