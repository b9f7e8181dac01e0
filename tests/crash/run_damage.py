"""One damaged file of a run: it goes on right, or says what is wrong by name. Never other weights without a word.

    python -m tests.crash.run_damage [--count N] [--kind KIND] [NAME...]

Runs of five kinds are made, each with another one beside it that has another seed: steps that draw from all rollouts so
far, conversations, adapters, a collector beside a learner, and a replay. Then one file is damaged, and every column of
the store by name: a flipped bit, a cut, a missing file, the same file of the other run. The run is continued in a
process of its own, with two steps more, and judged from outside:

- it ends with the weights, ledger and figures of the run whose files are whole; or
- it ends with an error of this package that is a sentence; or
- it says that it differs, and from which step (a power loss may have taken rows that a ledger names).
"""

from __future__ import annotations

import argparse
import collections
import functools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rlhf_pipeline import FrozenLake, Pipeline
from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.crash._lakes import small_lake
from tests.damage import damage, used
from tests.processes import Children
from tests.rlhf_pipeline.small import changed, collect, learn, offline, tiny, weights
from trajectory_store import StoreError

KINDS: Final = ("flip", "cut", "missing", "foreign")
STEPS: Final = 6
"""Of the whole run; it is damaged after two fewer."""
_PATIENCE_S: Final = 180
_LEFT_OUT: Final = ("lock", ".lock", ".txt", ".log", ".html", ".tmp", "heartbeat")
"""Files that hold no state of a run: locks, and what is for people."""
_SAID: Final = ("no longer identical to the interrupted one", "are missing from the store: with buffer.durability")
"""What a run says that goes on with other trajectories than before."""
_TIMED: Final = frozenset(
    {
        "time",
        "tokens_per_s",
        "rollout_s",
        "collect_s",
        "learn_s",
        "mfu",
        "peak_memory_mb",
        "watermark",
        "row_ids",
        "crc32c",
    }
)

DRAWN = {"sample__strategy": "uniform", "sample__batch_size": "8", "buffer__max_staleness": "8", "learn__epochs": "1"}


def drawn(_: Path) -> Pipeline:
    """Steps that draw from the rollouts of the last eight."""
    return tiny(**DRAWN)


def lake(_: Path) -> Pipeline:
    """Conversations."""
    small = {"collect__prompts_per_rollout": 2, "collect__group_size": 4, "learn__checkpoint_every": 2}
    return small_lake(FrozenLake, **small, buffer__max_staleness=8)


def adapters(_: Path) -> Pipeline:
    """Only adapters are trained."""
    return tiny(**DRAWN, policy__lora_rank="4")


def several(_: Path) -> Pipeline:
    """A collector beside a learner."""
    return tiny(**DRAWN, collect__num_slots="8")


def replay(folder: Path) -> Pipeline:
    """A run over the store of another one."""
    if not (folder / "source").exists():
        assert not lived(lambda: go("source", tiny(), folder / "source", 3), folder / "said")
    return offline(folder / "source" / "store", learn__checkpoint_every="2")


RUNS: Final[dict[str, Callable[[Path], Pipeline]]] = {
    "drawn": drawn,
    "lake": lake,
    "adapters": adapters,
    "several": several,
    "replay": replay,
}


def go(name: str, pipeline: Pipeline, run_dir: Path, steps: int, seed: int = 0) -> None:
    """Begin a run, or continue it, up to a step."""
    pipeline = changed(pipeline, learn__steps=str(steps), learn__stop_at_reward="none")
    if name != "several":
        run(pipeline, run_dir=run_dir, seed=seed, resume=run_dir.exists(), on_event=print_notices)
        return
    signal.signal(signal.SIGUSR1, _refused)
    with Children(run_dir.with_name(f"collector-of-{run_dir.name}")) as children:
        collector = children.fork(lambda: _collect(pipeline, run_dir))
        learn(pipeline, run_dir=run_dir, on_event=print_notices)
        collector.wait()


def _collect(pipeline: Pipeline, run_dir: Path) -> None:
    parent = os.getppid()
    try:
        collect(pipeline, run_dir=run_dir)
    except BaseException:
        os.kill(parent, signal.SIGUSR1)
        raise


def _refused(*_: object) -> None:
    raise PipelineError("the collector has refused")


def print_notices(event: Event) -> None:
    """Write what a run says to its user."""
    if isinstance(event, Notice):
        sys.stderr.write(f"{event.message}\n")


def lived(act: Callable[[], None], said: Path) -> int:
    """Do something in a process of its own; return its exit code: 0, 3 for an error of this package, 1 for another."""

    def live() -> None:
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler would wait for Python, which may hang
        signal.alarm(_PATIENCE_S)
        try:
            act()
        except (PipelineError, StoreError) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            sys.exit(3)
        except BaseException as error:  # noqa: BLE001 - judged by the parent
            sys.stderr.write(f"RAW {type(error).__name__}: {error}\n")
            sys.exit(1)

    with Children(said.with_suffix(".processes")) as children:
        child = children.fork(live)
        code = child.wait(2 * _PATIENCE_S)
    said.write_text(child.output())
    return code


def files_of(folder: Path) -> list[Path]:
    """Return the files of a run that hold its state."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.stat().st_size
        and not path.name.endswith(_LEFT_OUT)
        and "processes" not in path.parts
    ]


def figures(folder: Path) -> list[dict[str, object]]:
    """Return what the lines of ledger and metrics say that does not depend on the time."""
    run = RunFolder(folder)
    return [
        {name: value for name, value in row.items() if name not in _TIMED and not name.endswith("_s")}
        for rows in (run.ledger, run.metrics)
        for row in rows
    ]


def problems(folder: Path, whole: Path, code: int, said: str) -> Iterator[str]:
    """Say what is wrong with how a damaged run went on."""
    lines = said.strip().splitlines()
    if code == 3:
        if len(lines[-1]) < 40:
            yield f"a refusal that names nothing: {lines[-1]}"
    elif code:
        yield f"ended with {code}: {lines[-1] if lines else 'silent'}"
    elif weights(folder) != weights(whole) and not any(words in said for words in _SAID):
        yield "other weights, without a word"
    elif weights(folder) == weights(whole) and figures(folder) != figures(whole):
        yield "other figures"


def sweep(name: str, *, count: int | None, kinds: tuple[str, ...] = KINDS, seed: int = 0) -> collections.Counter[str]:
    """Damage the files of a run, each in every way, or so many of them; return the counts of outcomes and problems."""
    rng, counts = random.Random(f"{name} {seed}"), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pipeline, base, other_run, whole = RUNS[name](folder), folder / "base", folder / "other", folder / "whole"
        for run_dir, of_it in ((base, 0), (other_run, 5)):
            assert not lived(lambda at=run_dir, seed=of_it: go(name, pipeline, at, STEPS - 2, seed), folder / "said")
        shutil.copytree(base, whole)
        assert not lived(lambda: go(name, pipeline, whole, STEPS), folder / "said"), (folder / "said").read_text()
        # The last step again: what the ledger names is then read again, too.
        shutil.rmtree(max((base / "checkpoints").iterdir()))
        cases = [(path.relative_to(base), kind) for path in files_of(base) for kind in kinds]
        if count is not None:
            cases = rng.sample(cases, min(count, len(cases)))
        for path, kind in cases:
            run_dir = folder / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            shutil.copytree(base, run_dir)
            if not damage(run_dir / path, kind, rng, other_run / path, within=used(run_dir / path)):
                continue
            code = lived(functools.partial(go, name, pipeline, run_dir, STEPS), folder / "said")
            said = (folder / "said").read_text(errors="replace")
            wrong = list(problems(run_dir, whole, code, said))
            counts["refused by name" if code == 3 else "went on"] += not wrong
            for words in wrong:
                counts[f"WRONG: {path}, {kind}: {words}"] += 1
    return counts


def main() -> int:
    """Sweep the named runs, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--count", type=int, help="damages of each run; all files in every way by default")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    bad = 0
    for name in args.names or RUNS:
        began = time.monotonic()
        counts = sweep(name, count=args.count, kinds=tuple(args.kind or KINDS), seed=args.seed)
        wrong = {words: times for words, times in counts.items() if words.startswith("WRONG")}
        bad += sum(wrong.values())
        sys.stdout.write(
            f"{name}: {counts['went on']} went on as they should, {counts['refused by name']} were refused by name, "
            f"{sum(wrong.values())} wrong ({time.monotonic() - began:.0f} s)\n"
        )
        sys.stdout.write("".join(f"  {words}\n" for words in wrong))
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
