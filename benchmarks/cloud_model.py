"""What a run at a URL asks of its object store: a formula per kind of request, and what that costs.

    python -m benchmarks.cloud_model                                  1, 8, 64 and 1,000 hosts
    python -m benchmarks.cloud_model --weights-mb 14000 --tokens 500000 --rollout-s 60 --update-s 20

Every request per step and per rollout has a reason; `predicted` adds them up. A process that waits pauses between two
looks for half of the time it has waited, at least 0.25 s and at most 2 s; new weights reset that time. Money is the
list price of S3 Standard in us-east-1 (2026): 0.005 USD per thousand puts and lists, 0.0004 USD per thousand reads,
nothing for deletes and for bytes within the region.

`bench_cloud` compares the formulas with the requests and bytes of a run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

PUT_USD, GET_USD = 0.005e-3, 0.0004e-3
BESIDE_BYTES = 1200
"""Of a pointer, a record, a claim, a lease, and the lines of ledger and metrics, each about."""
SHORTEST_S, LONGEST_S = 0.25, 2.0
"""Between two looks of a process that waits."""
AT_ONCE = 64
"""Requests of one process that are on their way at the same time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in its steady state.

    Attributes:
        collectors: processes that collect, a host each.
        rollout_s: seconds that one of them samples a rollout.
        update_s: seconds of a step on one.
        rollout_bytes: of the object of a rollout's trajectories.
        weights_bytes: that change with a step, and that every collector fetches.
        list_bytes: of the list of pieces of a version of the weights.
        tokens: of a rollout.
        lease_s: after which a silent process is taken for dead.
        round_trip_s: of a small request.
        checkpoint_every: steps per checkpoint.
        state_bytes: of the optimizer, in a checkpoint.
        max_staleness: steps that the weights of a rollout may be older than those it is learned with.
        paced_s: seconds per step, where they were measured.
    """

    collectors: int
    rollout_s: float
    update_s: float
    rollout_bytes: float
    weights_bytes: float
    list_bytes: float = 2000.0
    tokens: float = 1e5
    lease_s: float = 30.0
    round_trip_s: float = 0.02
    checkpoint_every: float = math.inf
    state_bytes: float = 0.0
    max_staleness: float = math.inf
    paced_s: float | None = None

    @property
    def collector_busy_s(self) -> float:
        """Per rollout: claim, weights, sampling, commit and record; the requests of each wait for those before."""
        return self.rollout_s + 8 * self.round_trip_s

    @property
    def learner_busy_s(self) -> float:
        """Per step: puts go their way beside the work, as do list and record; catalog and segments are read before."""
        return self.update_s + (1 + math.ceil((self.collectors + 1) / AT_ONCE)) * self.round_trip_s

    @property
    def step_s(self) -> float:
        """Seconds per step: the slower side decides, or the claims, which are made one after another."""
        if self.paced_s is not None:
            return self.paced_s
        return max(self.learner_busy_s, self.collector_busy_s / self.collectors, 3 * self.round_trip_s)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Requests and bytes per step.

    Attributes:
        puts: that write.
        gets: that read.
        lists: that list.
        deletes: that delete.
        sent: bytes that are written.
        received: bytes that are read.
    """

    puts: float
    gets: float
    lists: float
    deletes: float
    sent: float
    received: float

    @property
    def requests(self) -> float:
        """All of them."""
        return self.puts + self.gets + self.lists + self.deletes

    @property
    def usd(self) -> float:
        """What the requests cost."""
        return (self.puts + self.lists) * PUT_USD + self.gets * GET_USD


def looks(wait_s: float, round_trip_s: float) -> float:
    """How often, on average, a process looks again while it waits for something, after a claim that was refused.

    >>> looks(0.0, 0.02), looks(0.7, 0.0), round(looks(10.0, 0.0), 1)
    (0.0, 2.8, 10.2)
    """
    count, waited = 0.0, 3 * round_trip_s
    while waited < wait_s:
        pause = min(max(waited / 2, SHORTEST_S), LONGEST_S) + round_trip_s
        count += min((wait_s - waited) / pause, 1.0)
        waited += pause
    return count


def predicted(run: Run) -> Asked:
    """What all processes of a run ask for per step, one rollout each."""
    step, n, trip = run.step_s, run.collectors, run.round_trip_s
    steps = run.collector_busy_s / step
    waiting = max(n - math.floor(steps), 0)  # collectors, when a step's weights are published and let one of them begin
    waits, claims, lost = 0.0, 1.0, 0.0
    if waiting:
        # The collectors that lose look until the next weights; the one that wins, from the end of its rollout on.
        waits = (waiting - 1) * looks(step, trip) + 0.5 + looks((math.floor(steps) + 1 - steps) * step, trip)
        # Those that read the claims before the winner replaced them must read them again.
        lost = (waiting - 1) * min(2 * trip / (SHORTEST_S + trip), 1.0)
        claims = 1 + min(waiting, waits) + lost
    # From the start of a step to the arrival of the next rollout: a whole step where the collectors are slower;
    # else the rollout could only begin after a collector had seen the weights of `max_staleness - 1` steps before.
    late = 4 * trip + SHORTEST_S / 2 + run.collector_busy_s - (run.max_staleness - 1) * step
    late = step if run.collector_busy_s / n >= run.learner_busy_s else min(max(late, 0.0), step)
    alone = 1 + looks(late, trip)  # of the learner, for a rollout
    renewals = (n + 1) * step / (run.lease_s / 4)
    packs = math.ceil(run.weights_bytes / 2**26)
    checkpoints = (1 + math.ceil(run.state_bytes / 2**26)) / run.checkpoint_every
    learner = Asked(
        puts=2 + packs + 2 + checkpoints,  # ledger and metrics; pieces, their list and the pointer
        gets=1 + n + 1,  # the record; the next commit of every segment, and the one behind a new one
        lists=1 + alone,  # catalog and rollouts
        deletes=1 + packs,
        sent=run.weights_bytes + run.list_bytes + 3 * BESIDE_BYTES + run.state_bytes / run.checkpoint_every,
        received=run.rollout_bytes + BESIDE_BYTES,
    )
    collector = Asked(
        puts=3 + lost,  # the claim, the trajectories and their record
        gets=1 + waits + claims + 1 + packs,  # the pointer; the claims; the list of pieces, and the pieces
        lists=1 + lost + (n > 1) * n * step / (run.lease_s / 4),  # rollouts, where a claim may succeed; the leases
        deletes=0,
        sent=run.rollout_bytes + 2 * BESIDE_BYTES,
        received=run.weights_bytes + run.list_bytes + (1 + claims) * BESIDE_BYTES,
    )
    return Asked(
        puts=learner.puts + collector.puts + renewals,
        gets=learner.gets + collector.gets,
        lists=learner.lists + collector.lists,
        deletes=learner.deletes,
        sent=learner.sent + collector.sent + renewals * BESIDE_BYTES / 4,
        received=learner.received + collector.received,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=5e5, help="of a rollout (default: %(default)g)")
    parser.add_argument("--bytes-per-token", type=float, default=12.0, help="in the store (default: %(default)g)")
    parser.add_argument("--rollout-s", type=float, default=60.0, help="of one host (default: %(default)g)")
    parser.add_argument("--update-s", type=float, default=10.0, help="of a step (default: %(default)g)")
    parser.add_argument("--weights-mb", type=float, default=3000.0, help="that change (default: %(default)g)")
    parser.add_argument("--round-trip-ms", type=float, default=20.0, help="of a request (default: %(default)g)")
    args = parser.parse_args()
    run = Run(
        collectors=1,
        rollout_s=args.rollout_s,
        update_s=args.update_s,
        rollout_bytes=args.tokens * args.bytes_per_token,
        weights_bytes=args.weights_mb * 1e6,
        tokens=args.tokens,
        round_trip_s=args.round_trip_ms / 1e3,
    )
    print(
        "| collectors | s per step | requests per s | requests / 10^6 tokens | MB / 10^6 tokens | USD / 10^6 tokens |"
    )
    print("|---|---|---|---|---|---|")
    for hosts in (1, 8, 64, 1000):
        one = replace(run, collectors=hosts)
        asked, per = predicted(one), 1e6 / run.tokens
        megabytes = (asked.sent + asked.received) / 1e6 * per
        cells = [
            f"{hosts:,}",
            f"{one.step_s:.2f}",
            f"{asked.requests / one.step_s:,.0f}",
            f"{asked.requests * per:,.0f}",
        ]
        print(f"| {' | '.join([*cells, f'{megabytes:,.0f}', f'{asked.usd * per:.5f}'])} |")


if __name__ == "__main__":
    main()
