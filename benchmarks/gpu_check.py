"""What a machine with one GPU must show; `gpu_check.sh` starts it. A section that fails is passed over.

    benchmarks/gpu_check.sh --out results        # results/gpu_check.json, a table, and what each section printed
    benchmarks/gpu_check.sh --tiny               # tiny sizes on any machine
    benchmarks/gpu_check.sh --only kernels,step

| section | what it shows |
|---|---|
| kernels | the tests marked `gpu`: variable-length attention, bfloat16 products, the head's kernels |
| runs | `copy_digits` and `frozen_lake` on the device, killed with SIGKILL and resumed to the end |
| step | the learner's step at the 0.5B shape in bfloat16: MFU, tokens/s, memory, full logits in the same run |
| decode | sampled tokens/s of the slots, and of `transformers.generate` in the same run |

The exit code is 1 if a section failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "rlhf_pipeline"]
Result = dict[str, Any]


def kernels(out: Path, *, tiny: bool, device: str) -> Result:
    """Run the tests marked `gpu`; on a CPU they skip themselves."""
    files = sorted({str(path) for path in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()})
    told = _run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files], out / "kernels.log", seconds=150)
    last = told.strip().splitlines()[-1]
    return {"tests": last}


def runs(out: Path, *, tiny: bool, device: str) -> Result:
    """Kill a run of each of two pipelines, resume it, and read how it ended."""
    found: Result = {}
    for name, steps, kill_at in (("copy_digits", 60, 20), ("frozen_lake", 40, 10)):
        steps, kill_at = (6, 2) if tiny else (steps, kill_at)
        run = out / name
        command = [*COMMAND, "run", name, "--out", str(run), "--device", device, "--steps", str(steps)]
        command += ["--set", "learn.checkpoint_every=2"]
        log = out / f"{name}.log"
        started = time.monotonic()
        with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT) as process:
            while process.poll() is None and _steps(run) < kill_at and time.monotonic() - started < 90:
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        killed = _steps(run)
        _run([*command, "--resume"], log, seconds=90)
        _run([*COMMAND, "verify", str(run)], out / f"{name}-verify.log", seconds=60)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)], "steps are missing or doubled"
        gaps = [line["sampler_gap"] for line in lines if line.get("sampler_gap") is not None]
        found[name] = {
            "steps": len(lines),
            "killed after": killed,
            "reward": lines[-1]["task_reward"],
            "sampler_gap": max(gaps, default=None),
            "seconds": round(time.monotonic() - started, 1),
        }
    return found


def step(out: Path, *, tiny: bool, device: str) -> Result:
    """Measure the learner's step."""
    return _learner("step", out, tiny=tiny, more=["--reps", "2"], seconds=210)


def decode(out: Path, *, tiny: bool, device: str) -> Result:
    """Measure sampling."""
    return _learner("decode", out, tiny=tiny, more=["--slots", "64"], seconds=120)


SECTIONS: dict[str, Callable[..., Result]] = {"kernels": kernels, "runs": runs, "step": step, "decode": decode}


def main() -> int:
    """Run the sections, and print and write what they found."""
    parser = argparse.ArgumentParser(description="What a machine with one GPU must show.")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the device there is")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    args = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        print("There is no CUDA device here. `benchmarks/gpu_check.sh --tiny` runs everything at a tiny size.")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results: Result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "tiny": args.tiny,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }
    for name in args.only.split(","):
        started = time.monotonic()
        try:
            results[name] = SECTIONS[name](args.out, tiny=args.tiny, device=device)
        except Exception as error:  # noqa: BLE001 - the other sections may still show something
            results[name] = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        results[name]["wall seconds"] = round(time.monotonic() - started, 1)
        # After each section: a machine that is taken away leaves what it has shown.
        (args.out / "gpu_check.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    print(f"written: {args.out / 'gpu_check.json'}")
    return 1 if any("failed" in found for found in results.values() if isinstance(found, dict)) else 0


def table(results: Result) -> list[str]:
    """Return a line for each finding: the section, what it is of, and its figures."""
    lines = [f"{results['device']}, torch {results['versions']['torch']}, {results['date']}"]
    for section in SECTIONS:
        for name, value in results.get(section, {}).items():
            figures = value.items() if isinstance(value, dict) else [("", value)]
            shown = "  ".join(f"{part} {_shown(figure)}".strip() for part, figure in figures)
            lines.append(f"  {section:<8} {name:<38} {shown}")
    return lines


def _shown(figure: object) -> str:
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)


def _learner(section: str, out: Path, *, tiny: bool, more: list[str], seconds: int) -> Result:
    file = out / f"{section}.json"
    size = ["--tiny"] if tiny else ["--models", "0.5b", *more]
    command = [sys.executable, str(HERE / "bench_learner_h200.py"), "--sections", section, *size, "--json", str(file)]
    _run(command, out / f"{section}.log", seconds=seconds)
    found = json.loads(file.read_text())
    figures = next(value for name, value in found.items() if name.startswith(f"{section} "))
    return {"peak TFLOP/s, measured": found["peak_flops"] / 1e12, **figures}


def _steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _run(command: list[str], log: Path, *, seconds: int) -> str:
    """Run a command with its output in a file; raise with the last of it if it fails or takes too long."""
    with log.open("ab") as stream:
        begun = stream.tell()
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=seconds, check=False).returncode
    told = log.read_bytes()[begun:].decode(errors="replace")
    if code:
        raise RuntimeError(f"exit {code}: {' '.join(command[-6:])}\n{told[-1500:]}")
    return told


if __name__ == "__main__":
    raise SystemExit(main())
