"""A run at a URL against the same run in a folder: time per step, requests and bytes, and what the model says of them.

    python -m benchmarks.bench_cloud            about eight minutes
    python -m benchmarks.bench_cloud --quick    half of the steps

A learner and two collectors, started by the commands that a person types, with `buffer.max_staleness=2` so that they
overlap; in a folder, and behind a proxy that adds 20 ms to every request to an S3 server on this machine. The server is
a Python program on the same cores, so it takes time from the run that a real one would not; the steps are of a size
(about a second) at which that does not hide what is measured. Requests and bytes are counted by the proxy, and by the
processes in metrics.jsonl, where those of a collector that waits come with its next rollout. The model is
`cloud_model.py` with the sizes and times of this run. Then the learner is stopped, and after it the collectors instead,
for a while: what the others ask for meanwhile is what a process costs that has nothing to do. A batch is read from the
store by a reader that has just opened it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store

from benchmarks.cloud_model import Run, predicted
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.folder import RunFolder
from tests.crash._s3 import Rig, serve
from trajectory_store import TrajectoryStore
from trajectory_store.objects.remote import open_bucket

COLLECTORS = 2
WARM, LEAVE = 8, 4
"""Steps that are left out: processes begin, and segments are small; processes are about to end."""
SMALL_BYTES = 8192
"""An object of a segment that is smaller is its end."""
IDLE_S = 20.0
SETTINGS = {
    "buffer.max_staleness": "2",
    "prompts.num_digits": "24",
    "collect.prompts_per_rollout": "48",
    "collect.max_new_tokens": "24",
    "policy.hidden_size": "128",
    "learn.stop_at_reward": "none",
    "learn.checkpoint_every": "1000",
}
GOALS = {"time": 1.15, "commit": 2.0, "idle": 1.0, "model": 0.10, "cold": 10.0}


@dataclass
class Processes:
    """A learner and collectors of one run."""

    place: Address
    folder: Path
    steps: int

    def start(self) -> None:
        """Start all of them."""
        sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        ends = ["--run", str(self.place), *sets, "--set", f"learn.steps={self.steps}"]
        commands = [["learn", "copy_digits", *ends], *[["collect", "copy_digits", *ends]] * COLLECTORS]
        log = (self.folder / "processes.log").open("ab")
        self.lives = [
            subprocess.Popen([sys.executable, "-m", "rlhf_pipeline", *command], stdout=log, stderr=log)
            for command in commands
        ]

    def wait(self, step: int, rig: Rig | None) -> int:
        """Wait until a step is taken; returns the newest one."""
        end = time.monotonic() + 600
        with unseen(rig):
            run, rows = RunFolder(self.place), None
        while rows is None or rows.last_step < step:
            time.sleep(1.0)
            assert time.monotonic() < end, (self.folder / "processes.log").read_text()[-2000:]
            with unseen(rig):
                rows = run.rows(run.metrics_file) if run.record.exists else None
        return rows.last_step

    def signal(self, number: int, lives: Sequence[subprocess.Popen[bytes]]) -> None:
        """Stop some, or let them go on."""
        for life in lives:
            os.kill(life.pid, number)

    def end(self) -> None:
        """Kill who is left."""
        for life in self.lives:
            life.kill()
            life.wait()


@contextmanager
def unseen(rig: Rig | None) -> Generator[None]:
    """What this process asks for is not counted."""
    if rig is not None:
        rig.calm()
    try:
        yield
    finally:
        if rig is not None:
            rig.rough()


def requests(counts: Mapping[str, float]) -> float:
    """All requests that the proxy has counted."""
    return sum(counts.get(name, 0) for name in ("puts", "gets", "lists", "deletes"))


def less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What came between two counts."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def measured(
    place: Address, folder: Path, steps: int, rig: Rig | None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The metrics of the steps behind the first ones, and what the proxy counted per step meanwhile."""
    folder.mkdir()
    processes = Processes(place, folder, steps + LEAVE)
    processes.start()
    try:
        counted = [(processes.wait(step, rig), {} if rig is None else rig.counts()) for step in (WARM, steps)]
        for life in processes.lives:
            life.wait(60)
    finally:
        processes.end()
    (first, before), (last, after) = counted
    with unseen(rig):
        rows = [row for row in RunFolder(place).metrics if WARM < row["step"] <= steps]
    return rows, {name: count / (last - first) for name, count in less(after, before).items()}


def sizes(url: str) -> dict[str, float]:
    """The mean size of the objects that a step leaves, by the attribute of the model that it is."""
    found: dict[str, list[int]] = {"rollout_bytes": [], "weights_bytes": [], "list_bytes": []}
    for page in obstore.list(obstore.store.from_url(url)):
        for item in page:
            key, size = str(item["path"]), int(item["size"])
            if key.endswith(".zip") and size > SMALL_BYTES:
                found["rollout_bytes"].append(size)
            elif key.startswith("weights/version"):
                found["list_bytes"].append(size)
                found["weights_bytes"].append(pack_bytes(url, key))
    return {name: float(np.mean(values)) for name, values in found.items()}


def pack_bytes(url: str, key: str) -> int:
    """What a version of the weights has in packs of its own."""
    rows = json.loads(bytes(obstore.get(obstore.store.from_url(url), key).bytes()))["files"]
    own = {place[1] for pieces in rows.values() for place in pieces if place[1]}
    store = obstore.store.from_url(url)
    return max(int(obstore.head(store, pack)["size"]) for pack in own)


def idle(rig: Rig, folder: Path) -> dict[str, float]:
    """Requests per second and process while nothing happens."""
    folder.mkdir()
    processes = Processes(f"{rig.url}-idle", folder, 1000)
    processes.start()
    found: dict[str, float] = {}
    try:
        processes.wait(3, rig)
        learner, *collectors = processes.lives
        for name, stopped, others in (("collector", [learner], COLLECTORS), ("learner", collectors, 1)):
            processes.signal(signal.SIGSTOP, stopped)
            time.sleep(10.0)  # until nobody has anything left to do
            before = rig.counts()
            time.sleep(IDLE_S)
            found[name] = requests(less(rig.counts(), before)) / IDLE_S / others
            processes.signal(signal.SIGCONT, stopped)
            time.sleep(3.0)
    finally:
        processes.end()
    return found


def round_trip_s(url: str) -> float:
    """Wall time of a small request."""
    bucket, times = open_bucket(url, durable=False), list[float]()
    for _ in range(10):
        started = time.perf_counter()
        bucket.get("config.json")
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def cold_round_trips(url: str) -> dict[str, float]:
    """Wall time of an open, and of the first padded batch of 64 behind it, in times of a small request."""
    trip, found = round_trip_s(url), dict[str, list[float]](open=[], batch=[])
    for seed in range(5):
        started = time.perf_counter()
        with TrajectoryStore.open(f"{url}/store") as store:
            found["open"].append((time.perf_counter() - started) / trip)
            ids, before = np.random.default_rng(seed).choice(store.ids(), 64, replace=False), store.traffic.requests
            started = time.perf_counter()
            store.read_padded(ids)
            found["batch"].append((time.perf_counter() - started) / trip)
            assert store.traffic.requests > before, "nothing was fetched: the batch was not cold"
    return {name: float(np.median(trips)) for name, trips in found.items()}


def seconds_per_step(rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean over all but the first."""
    return (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)


def total(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    """Of the learner and of the rollouts."""
    return sum((row.get(name) or 0) + (row.get(f"rollout_{name}") or 0) for row in rows)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> int:
    """Measure, print, and judge; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    steps, missed = (24 if args.quick else 48), list[str]()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def goal(name: str, what: str, value: float, most: float) -> None:
        met = value <= most
        say(f"{what}: {value:.3g} (goal: at most {most:g}, {'met' if met else 'MISSED'})")
        if not met:
            missed.append(name)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rig = stack.enter_context(serve(folder, faults={}))
        say(f"{COLLECTORS} collectors and a learner, {steps} steps, of which {WARM} are left out")
        pace: dict[str, list[float]] = {"folder": [], "URL": []}
        for number in range(args.rounds):  # in turn, as the machine may do something else, too
            local, _ = measured(folder / f"run-{number}", folder / f"local-{number}", steps, None)
            place = f"{rig.url}-{number}"
            url, proxy = measured(place, folder / f"url-{number}", steps, rig)
            pace["folder"].append(seconds_per_step(local))
            pace["URL"].append(seconds_per_step(url))
            say(f"seconds per step: folder {pace['folder'][-1]:.3f}, URL {pace['URL'][-1]:.3f}")
        goal(
            "time",
            "time per step, URL over folder, best of each",
            min(pace["URL"]) / min(pace["folder"]),
            GOALS["time"],
        )
        ended = proxy["puts store/seg-#/zarr.json"]  # a segment that begins ends another one, with a put of its own
        puts = proxy["puts store/seg-#/#.zip"] - ended + proxy["puts rollouts/#.json"]
        goal("commit", "puts per commit of a rollout", puts / proxy["puts rollouts/#.json"], GOALS["commit"])
        with unseen(rig):
            run = Run(
                collectors=COLLECTORS,
                rollout_s=float(np.mean([row["rollout_s"] for row in url])),
                update_s=float(np.mean([row["update_s"] for row in url])),
                max_staleness=float(SETTINGS["buffer.max_staleness"]),
                paced_s=pace["URL"][-1],
                **sizes(place),
            )
        run = replace(run, round_trip_s=round_trip_s(place))
        asked = predicted(run)
        model = {"requests": asked.requests, "bytes_sent": asked.sent, "bytes_received": asked.received}
        seen = {"requests": requests(proxy), "bytes_sent": proxy["sent"], "bytes_received": proxy["received"]}
        for name, said in model.items():
            told, counted = total(url, name) / len(url), seen[name]
            say(f"{name} per step: by the proxy {counted:.1f}, by the processes {told:.1f}, the model {said:.1f}")
            goal("model", f"the model's {name} against those counted", abs(said / counted - 1), GOALS["model"])
        for name, trips in cold_round_trips(place).items():
            goal(
                "cold",
                f"{name} of a cold reader (a padded batch has 64 rows), in round trips of wall time",
                trips,
                GOALS["cold"],
            )
        say("  " + ", ".join(f"{name} {count:.2f}" for name, count in sorted(proxy.items()) if count and " " in name))
        say(f"  {run}")
        for name, rate in idle(rig, folder / "idle").items():
            goal("idle", f"requests per second of an idle {name}", rate, GOALS["idle"])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
