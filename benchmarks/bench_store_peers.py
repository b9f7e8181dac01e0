"""One table: the trajectory store against the stores people use today, in one run on one machine.

    python benchmarks/bench_store_peers.py [--quick] [--save FILE] [--only NAME ...]

Every store gets the same trajectories (log-normal lengths, four columns of 13 bytes per token) and, in turns:
commits of 64 trajectories, batches of 64 random rows to four padded columns, an open in a fresh process, and a
SIGKILL in the middle of appending, after which the store's own reader opens what is left. Ratios to one thread's
memcpy of the payload (13 bytes per token; padding does not count for anybody) are medians of the calls of all
turns, by wall time and by processor time, which counts all threads and does not see a busy neighbour. Nobody syncs
to the disk: the durability compared is that of a killed process. Pages are in the page cache; before a turn of appends
a file is written and deleted, so that nobody pays for a page that the machine has yet to get from its host. A peer that
is not installed is named and left out. `bench_store_goals.py` holds the store's own figures against their goals.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
from _peers import PEERS
from _peers.base import Batch, Clocks, Memcpy, Peer, installed, make_commits
from _stores import BATCH, BYTES_PER_TOKEN, TOKEN_COLUMNS, disk_bytes, have_pages

from trajectory_store import RaggedArray

PACKAGES = ("numpy", "torch", "torchrl", "tensordict", "zarr", "pyarrow", "datasets", "lmdb", "pylance", "duckdb")


def check(peer: Peer, commits: list[Batch], rows: np.ndarray) -> None:
    """Stop if the reader gives back anything but what was written."""
    batch = peer.sample(rows)
    for name in TOKEN_COLUMNS:
        got = np.asarray(batch[name])
        for k, row in enumerate(rows.tolist()):
            want = commits[row // BATCH][name][row % BATCH]
            if not (np.array_equal(got[k, : len(want)], want) and not got[k, len(want) :].any()):
                raise ValueError(f"{peer.name}: column {name} of row {row} is not what was written.")


def child(command: str, name: str, path: Path, rows: int) -> None:
    """The parts that need a process of their own; they answer on standard output."""
    peer = next(kind for kind in PEERS if kind.name == name)()
    if command == "write":
        commits = make_commits(20)
        peer.create(path, rows)
        for i in range(rows // BATCH):
            peer.append(commits[i % len(commits)])
            os.write(1, b"%d\n" % ((i + 1) * BATCH))
        time.sleep(60)
    elif command == "open":
        warm_up(type(peer))
        picks = np.random.default_rng(1).choice(rows, BATCH, replace=False)
        start = time.perf_counter()
        peer.open(path, rows)
        opened = time.perf_counter()
        peer.sample(picks)
        print(json.dumps([opened - start, time.perf_counter() - start]))
    else:
        print(json.dumps(survivors(peer, path, rows)))


def warm_up(kind: type[Peer]) -> None:
    """Use the library once on another small store, so that imports do not count as opening."""
    with tempfile.TemporaryDirectory() as folder:
        peer, path = kind(), Path(folder, "small")
        peer.create(path, BATCH)
        peer.append(make_commits(1)[0])
        peer.close()
        peer.open(path, BATCH)
        peer.sample(np.arange(BATCH))


def survivors(peer: Peer, path: Path, acknowledged: int) -> dict[str, Any]:
    """Open what a killed writer left and compare every acknowledged row."""
    try:
        peer.open(path, 1 << 16)
        count = min(peer.count(), acknowledged)
        commits = make_commits(20)
        for first in range(0, count, BATCH):
            rows = np.arange(first, min(count, first + BATCH))
            check(peer, [commits[i % 20] for i in range(first // BATCH + 1)], rows)
        return {"rows": count, "error": ""}
    except Exception as error:  # noqa: BLE001 - whatever the reader raises is the result
        said = (str(error).splitlines() or [""])[0].replace(str(path), "<store>")
        result = {"rows": 0, "error": f"{type(error).__name__}: {said}"[:120]}
    try:
        result["salvaged"] = peer.salvage(path) if hasattr(peer, "salvage") else 0
    except Exception as error:  # noqa: BLE001
        result["salvage_error"] = type(error).__name__
    return result


def run_child(command: str, name: str, path: Path, rows: int) -> Any:
    """The answer of a fresh process."""
    line = [sys.executable, __file__, "--child", command, name, str(path), str(rows)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{name}, {command}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def kill_writer(name: str, path: Path, rows: int, rng: random.Random) -> dict[str, Any]:
    """SIGKILL a process in the middle of appending; what its rows look like afterwards."""
    line = [sys.executable, __file__, "--child", "write", name, str(path), str(rows)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as writer:
        try:
            seen, wanted = 0, BATCH * rng.randint(10, 25)
            while seen < wanted:
                text = writer.stdout.readline()
                if not text:
                    raise RuntimeError(f"{name}: the writer ended after {seen} rows.")
                seen = int(text)
            time.sleep(rng.random() * 0.003)
        finally:
            writer.kill()
        rest = writer.stdout.read().split(b"\n")[:-1]
    acknowledged = int(rest[-1]) if rest else seen
    if acknowledged == rows:
        raise RuntimeError(f"{name}: the writer was done before it was killed; give it more rows.")
    return {"acknowledged": acknowledged, **run_child("check", name, path, acknowledged)}


def measure_appends(peers: list[Peer], root: Path, commits: list[Batch], memcpy: Memcpy) -> dict[str, Clocks]:
    """All stores take turns, a tenth of the commits each; the first commit of a store is not counted."""
    clocks, part = {peer.name: Clocks() for peer in peers}, max(2, len(commits) // 10)
    for peer in peers:
        peer.create(root / peer.needs / type(peer).__name__, len(commits) * BATCH)
    for turn, first in enumerate(range(0, len(commits), part)):
        sizes = [[commit[name].values.nbytes for name in TOKEN_COLUMNS] for commit in commits[first : first + part]]
        have_pages(root, sizes * len(peers))
        memcpy.take()
        for k in range(len(peers)):
            peer = peers[(turn + k) % len(peers)]
            for i, commit in enumerate(commits[first : first + part]):
                with clocks[peer.name] if first + i else Clocks():
                    peer.append(commit)
    for peer in peers:
        peer.close()
    return clocks


def measure_samples(peers: list[Peer], root: Path, commits: list[Batch], memcpy: Memcpy, turns: int) -> dict[str, Any]:
    """All stores take turns of at most 40 batches or 0.4 seconds, after a few that are not counted."""
    count = len(commits) * BATCH
    rng = np.random.default_rng(3)
    picks = [rng.choice(count, BATCH, replace=False) for _ in range(100)]
    clocks = {peer.name: Clocks() for peer in peers}
    for peer in peers:
        if peer.on_disk:
            peer.open(root / peer.needs / type(peer).__name__, count)
        if peer.count() != count:
            raise ValueError(f"{peer.name} has {peer.count()} rows of {count}.")
        check(peer, commits, picks[0])
    for _ in range(turns):
        memcpy.take()
        for peer in peers:
            start = time.perf_counter()
            for i in rng.permutation(len(picks))[:50]:
                late = time.perf_counter() - start
                if late > 0.4:
                    break
                with clocks[peer.name] if i > 9 or late > 0.1 else Clocks():
                    peer.sample(picks[i])
    lengths = np.concatenate([commit["input_ids"].lengths for commit in commits])
    return {"clocks": clocks, "payload": float(np.mean([lengths[p].sum() for p in picks])) * BYTES_PER_TOKEN}


def measure_rows(peers: list[Peer], count: int, commits: list[Batch]) -> dict[str, dict[str, float]]:
    """Return the time of one row by id and by place, in microseconds, of the stores that read single rows."""
    rng, reads = np.random.default_rng(5), {}
    numbers = rng.integers(0, count, 300).tolist()
    for peer in peers:
        if type(peer).row is Peer.row:
            continue
        row = peer.row(numbers[0])
        for name in TOKEN_COLUMNS:
            if not np.array_equal(row[name], commits[numbers[0] // BATCH][name][numbers[0] % BATCH]):
                raise ValueError(f"{peer.name}: column {name} of row {numbers[0]} is not what was written.")
        reads |= {(peer.name, "row"): peer.row, (peer.name, "place"): peer.place}
    clocks = {key: Clocks() for key in reads}
    for turn in range(4):
        for key, read in reads.items():
            start = time.perf_counter()
            for number in numbers:
                with clocks[key] if turn else Clocks():
                    read(number)
                if time.perf_counter() - start > 1:
                    break
    times: dict[str, dict[str, float]] = {}
    for (name, kind), clock in clocks.items():
        times.setdefault(name, {})[kind] = clock.result()[0] * 1e6
    return times


def measure_small_commits(root: Path) -> dict[str, dict[str, float]]:
    """Return the processor time of 64 rows of 500 commits of one row: a reader's first batch, and later ones, in ms."""
    times: dict[str, dict[str, float]] = {}
    commits = make_commits(8)
    for kind in (kind for kind in PEERS if kind.name.startswith("trajectory_store")):
        writer, path = kind(), root / f"single-{kind.backend}"
        writer.create(path, 500)
        for number in range(500):
            row = {name: commits[number // BATCH][name][number % BATCH] for name in TOKEN_COLUMNS}
            writer.append({name: RaggedArray(values, [len(values)]) for name, values in row.items()})
        writer.close()
        first, later = Clocks(), Clocks()
        for _ in range(7):
            reader = kind()
            reader.open(path, 500)
            rng = np.random.default_rng(6)
            with first:
                reader.sample(rng.choice(500, BATCH, replace=False))
            for _ in range(30):
                reader.sample(rng.choice(500, BATCH, replace=False))
            for _ in range(30):
                with later:
                    reader.sample(rng.choice(500, BATCH, replace=False))
            reader.store.close()
        times[kind.name] = {"first": first.result()[1] * 1e3, "later": later.result()[1] * 1e3}
    return times


def small_reads(rows: dict[str, dict[str, float]], single: dict[str, dict[str, float]]) -> str:
    """The small reads as Markdown tables: the ratios are to LMDB, and of our backends to memmap."""
    base = rows.get("LMDB")
    lines = ["| store | a row by id, us | x LMDB | by place, us | x LMDB |", "|---|---|---|---|---|"]
    for name, times in rows.items():
        ratios = [f"{times[kind] / base[kind]:.1f}" if base else "-" for kind in ("row", "place")]
        lines.append(f"| {name} | {times['row']:.1f} | {ratios[0]} | {times['place']:.1f} | {ratios[1]} |")
    lines += ["", "| 64 rows of 500 commits of one row | first batch, ms | later batches, ms |", "|---|---|---|"]
    lines += [f"| {name} | {times['first']:.2f} | {times['later']:.2f} |" for name, times in single.items()]
    return "\n".join(lines)


def survived(rounds: list[dict[str, Any]]) -> str:
    """The cell of the table on SIGKILL."""
    total, kept = sum(r["acknowledged"] for r in rounds), sum(r["rows"] for r in rounds)
    if kept == total:
        return f"yes ({total} of {total})"
    text = f"no ({kept} of {total})"
    saved = sum(min(r.get("salvaged", r["rows"]), r["acknowledged"]) for r in rounds)
    return text + (f"; by hand {saved}" if saved > kept else "")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| store | append, x memcpy | (processor) | sample, x memcpy | (processor) "
        "| open + first batch, x ours | ms | disk / payload | acknowledged rows after SIGKILL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = next((r["open_ms"] for r in results.values() if r["open_ms"]), None)
    for name, r in results.items():
        opened = (f"{r['open_ms'] / base:.2f}", f"{r['open_ms']:.1f}") if r["open_ms"] else ("-", "-")
        disk = f"{r['disk']:.2f}" if r["disk"] else "-"
        speeds = [f"{r[key]:.4f}" for key in ("append", "append_cpu", "sample", "sample_cpu")]
        lines.append("| " + " | ".join([name, *speeds, *opened, disk, r["survived"]]) + " |")
    return "\n".join(lines)


def hardware() -> str:
    """Processor, cores, memory, system."""
    info = Path("/proc/cpuinfo")
    model = platform.processor()
    if info.exists():
        model = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, load {load:.1f} at the start"
    )


def versions() -> str:
    """What is compared, and Python."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def run(kinds: list[type[Peer]], root: Path, *, quick: bool) -> dict[str, Any]:
    """Measure everything and return the numbers."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
    commits, memcpy = make_commits(30 if quick else 160), Memcpy()
    peers = [kind() for kind in kinds]
    for peer in peers:
        __import__(peer.needs)
        (root / peer.needs).mkdir(exist_ok=True)
    payload = sum(len(c["input_ids"].values) for c in commits) * BYTES_PER_TOKEN
    appends = measure_appends(peers, root, commits, memcpy)
    samples = measure_samples(peers, root, commits, memcpy, 3 if quick else 6)
    small = {
        "rows": measure_rows([peer for peer in peers if peer.on_disk], len(commits) * BATCH, commits),
        "single": measure_small_commits(root),
    }
    rates, rng, results = memcpy.rates(), random.Random(), {}
    rounds = 2 if quick else 3
    for peer in peers:
        path, clocks = root / peer.needs / type(peer).__name__, samples["clocks"][peer.name]
        per_commit, per_batch = payload / len(commits), samples["payload"]
        wall, cpu = appends[peer.name].result()
        result = {"append": per_commit / wall / rates[0], "append_cpu": per_commit / cpu / rates[1]}
        result["append_ms"], (wall, cpu) = wall * 1e3, clocks.result()
        result |= {"sample": per_batch / wall / rates[0], "sample_cpu": per_batch / cpu / rates[1]}
        result |= {"sample_ms": wall * 1e3, "open_ms": None, "disk": None, "survived": "no (nothing on disk)"}
        if peer.on_disk:
            opens = [run_child("open", peer.name, path, len(commits) * BATCH)[1] for _ in range(rounds)]
            result |= {"open_ms": statistics.median(opens) * 1e3, "disk": disk_bytes(path) / payload}
            kills = [
                kill_writer(peer.name, root / peer.needs / f"{type(peer).__name__}-{i}", 2000 * BATCH, rng)
                for i in range(rounds)
            ]
            result |= {"survived": survived(kills), "kills": kills}
        results[peer.name] = result
    return {
        "rows": len(commits) * BATCH,
        "payload_mb": payload / 1e6,
        "memcpy_gb_s": [rate / 1e9 for rate in rates],
        "kills": rounds,
        "small_reads": small,
        "results": results,
    }


def main() -> int:
    """Print the table."""
    warnings.filterwarnings("ignore")  # not at import: tests import this module
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1920 rows instead of 10240")
    parser.add_argument("--only", nargs="+", default=[], help="stores whose name contains one of these")
    parser.add_argument("--save", type=Path, help="write the numbers as JSON too")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        command, name, path, rows = options.child
        child(command, name, Path(path), int(rows))
        return 0
    start, date = time.perf_counter(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = {"date": date, "hardware": hardware(), "versions": versions()}
    kinds = [k for k in PEERS if not options.only or any(text.lower() in k.name.lower() for text in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        found = {**about, **run(installed(kinds), Path(folder), quick=options.quick)}
    for key in about:
        print(f"{key}: {about[key]}")
    print(
        f"{found['rows']} trajectories, {found['payload_mb']:.0f} MB; memcpy {found['memcpy_gb_s'][0]:.1f} GB/s; "
        f"{found['kills']} kills per store; the run took {time.perf_counter() - start:.0f} s\n"
    )
    print(table(found["results"]) + "\n")
    print(small_reads(**found["small_reads"]) + "\n")
    for name, result in found["results"].items():
        for kill in result.get("kills", []):
            if kill["error"]:
                print(f"{name} after SIGKILL: {kill['error']}")
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
