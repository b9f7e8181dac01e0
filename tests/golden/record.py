"""Record the golden runs again and print what changed: `python -m tests.golden.record [NAME...]`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.golden.runs import RUNS, Digest, digest_of_definition, machine

DIGESTS = Path(__file__).with_name("digests.json")

TOLERANCE = 1e-4
"""How far a figure may be from the recorded one on another machine, absolute, and relative above 1."""


def recorded() -> dict[str, Any]:
    """Return the file of digests: the machine that made it, and the runs."""
    return json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {"machine": {}, "runs": {}}


def differences(before: Digest, now: Digest, *, exact: bool) -> list[str]:
    """Say how a digest differs from the one before.

    Args:
        before: what was recorded. Only what it has is compared: a new column or figure is no difference.
        now: what the run gives now.
        exact: compare every bit; otherwise only what another processor must repeat: counts, the trajectories of each
            step, and figures to `TOLERANCE`.
    """
    changes = []
    for name, was in before.items():
        value = now.get(name)
        if name == "columns" and exact:
            changes += [
                f"column {column}: {_difference(was[column], value, column)}" for column in _changed(was, value)
            ]
        elif name == "metrics":
            changes += _figures(was, value, exact=exact)
        elif name == "steps":
            changes += [f"step {i + 1} learns from other trajectories" for i in _changed_places(was, value)]
        elif (exact or name not in ("columns", "weights")) and was != value:
            changes.append(f"{name}: {was} became {value}")
    return changes


def _changed(was: dict[str, Any], value: dict[str, Any] | None) -> list[str]:
    return [name for name in was if value is None or value.get(name) != was[name]]


def _difference(was: str, value: dict[str, Any] | None, name: str) -> str:
    return "is gone" if value is None or name not in value else f"{was} became {value[name]}"


def _changed_places(was: list[Any], value: list[Any] | None) -> list[int]:
    value = value or []
    return [i for i in range(max(len(was), len(value))) if i >= len(was) or i >= len(value) or was[i] != value[i]]


def _figures(was: list[dict[str, str | None]], value: list[dict[str, str | None]] | None, *, exact: bool) -> list[str]:
    value = value or []
    if len(was) != len(value):
        return [f"metrics: {len(was)} steps became {len(value)}"]
    changes = []
    for step, (old, new) in enumerate(zip(was, value, strict=True), start=1):
        for name in old:
            a, b = (None if x is None else float.fromhex(x) for x in (old[name], new.get(name)))
            same = a == b if exact or a is None or b is None else _close(a, b)
            if not same:
                changes.append(f"step {step} {name}: {a!r} became {b!r}")
    return changes


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the named runs, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--dry", action="store_true", help="print what changed and leave the file as it is")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in RUNS]
    if unknown:
        parser.error(f"there is no run {unknown[0]}; there are {', '.join(RUNS)}")
    before = recorded()
    if chosen.names and before["machine"] != machine() and not chosen.dry:
        parser.error(
            f"{DIGESTS} was recorded on another machine ({before['machine']}); record all runs, without names."
        )
    runs = {name: digest for name, digest in before["runs"].items() if name in RUNS}
    for name in chosen.names or RUNS:
        now = digest_of_definition(name)
        changed = differences(runs[name], now, exact=True) if name in runs else []
        verdict = f"{len(changed)} differences" if changed else "as before"
        print(f"{name}: {verdict if name in runs else 'recorded for the first time'}")
        for line in changed:
            print(f"  {line}")
        runs[name] = now
    if not chosen.dry:
        ordered = {name: runs[name] for name in RUNS if name in runs}
        text = json.dumps({"machine": machine(), "runs": ordered}, indent=1, sort_keys=False)
        DIGESTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
