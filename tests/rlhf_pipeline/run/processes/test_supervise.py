"""The supervisor over small real processes, which live, fail, hang and end as told."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf_pipeline import definitions
from rlhf_pipeline.errors import DefinitionError, ProcessFailedError, RunExistsError
from rlhf_pipeline.run.events import Event, EventHandler, Notice, ignore_events
from rlhf_pipeline.run.processes import supervise
from rlhf_pipeline.run.processes.heartbeat import RENEWAL_S, Heartbeat, is_alive, process_lock, read_heartbeat
from rlhf_pipeline.run.processes.launch import PLACE, Subprocesses
from rlhf_pipeline.run.processes.supervise import Supervisor, SupervisorConfig, share_cores
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import StopRequest

ROOT = Path(__file__).resolve().parents[4]
NAMES = ("learner", "collector-0")

CHILD = """
import os, signal, sys, time
from pathlib import Path
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.processes import supervise
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, process_lock
from rlhf_pipeline.run.processes.weights import Published, publish, read_published
from rlhf_pipeline.run.signals import stop_on_signals

run_dir, name, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with (run_dir / f"{name}.starts").open("a") as file:
    file.write(f"{time.time()}\\n")
starts = len((run_dir / f"{name}.starts").read_text().splitlines())

def has_ended():
    published = read_published(RunFolder(run_dir))
    return published is not None and published.finished is not None

def end():
    publish(RunFolder(run_dir), Published(version=1, next_version=1, rollouts_done=1, finished="steps"), save=None)

with (
    stop_on_signals(parent) as stop,
    process_lock(run_dir / "processes", name, wait_s=5.0),
    Heartbeat(run_dir / "processes", name) as heartbeat,
):
"""

LEARNER = """
while not stop and not (run_dir / "enough").exists():
    heartbeat.beat("waiting for a rollout", step=0)
    time.sleep(0.02)
if stop:
    sys.exit(143)
end()
"""

COLLECTOR = """
heartbeat.beat("collecting", rollouts=1)
(run_dir / "enough").touch()
while not stop and not has_ended():
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch, caplog):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'storage'}")
    caplog.set_level(logging.INFO, logger="rlhf_pipeline.run.processes")


def command(run_dir: Path, name: str, body: str, parent: int | None = None) -> list[str]:
    code = CHILD + textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return [sys.executable, "-c", code, str(run_dir), name, str(parent or os.getpid())]


def supervisor(
    run_dir: Path,
    *,
    learner: str = LEARNER,
    collector: str = COLLECTOR,
    on_event: EventHandler = ignore_events,
    **settings,
) -> Supervisor:
    (run_dir / "processes").mkdir(parents=True, exist_ok=True)
    return Supervisor(
        run_dir,
        {
            "learner": command(run_dir, "learner", learner),
            "collector-0": command(run_dir, "collector-0", collector),
        },
        SupervisorConfig(**{"first_delay_s": 0.05, "stop_timeout_s": 20.0, **settings}),
        total_steps=9,
        heartbeat=Heartbeat(run_dir / "processes", "supervisor"),
        on_event=on_event,
    )


def assert_all_gone(watched: Supervisor) -> None:
    assert [pid for child in watched.children.values() for pid in child.pids.values()] == [None, None]
    assert not any(is_alive(watched.run_dir / "processes", name) for name in watched.children)


def num_starts(run_dir: Path, name: str) -> int:
    return len((run_dir / f"{name}.starts").read_text().splitlines())


@pytest.mark.crash
def test_a_dead_process_is_started_again_later_and_later_until_it_works(tmp_path, caplog):
    """Waits of 0.05, 0.1, 0.2 s; after a rollout the next failure waits 0.05 s again."""
    collector = """
    if starts <= 3:
        sys.exit(1)
    if starts == 4:
        heartbeat.beat("collecting", rollouts=1)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    watched = supervisor(tmp_path, collector=textwrap.dedent(collector) + COLLECTOR)
    assert watched.work(StopRequest()) == "steps"
    assert re.findall(r"collector-0 .* restarted in ([\d.]+) s", caplog.text) == ["0.05", "0.1", "0.2", "0.05"]
    assert "collector-0 was killed by SIGKILL" in caplog.text
    assert num_starts(tmp_path, "collector-0") == 5
    assert num_starts(tmp_path, "learner") == 1
    assert_all_gone(watched)


@pytest.mark.slow
def test_a_frozen_process_is_killed_and_started_again(tmp_path, caplog):
    """SIGSTOP freezes it: its heartbeat stops. The learner, which only waits, is left alone."""
    collector = """
    heartbeat.beat("collecting", rollouts=0)
    if starts == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    watched = supervisor(tmp_path, collector=textwrap.dedent(collector) + COLLECTOR, hang_timeout_s=5.0)
    assert watched.work(StopRequest()) == "steps"
    assert "collector-0: its heartbeat stopped" in caplog.text
    assert (num_starts(tmp_path, "collector-0"), num_starts(tmp_path, "learner")) == (2, 1)


@pytest.mark.crash
def test_a_rollout_without_end_is_killed_if_a_limit_is_set(tmp_path, caplog):
    """It is alive and its heartbeat is renewed, but it has been in one rollout for longer than allowed."""
    collector = """
    heartbeat.beat("collecting", rollout=7, rollouts=0)
    if starts == 1:
        time.sleep(60)
    """
    watched = supervisor(tmp_path, collector=textwrap.dedent(collector) + COLLECTOR, progress_timeout_s=0.5)
    assert watched.work(StopRequest()) == "steps"
    assert re.search(r"collector-0: it has been 'collecting' for \d+ s", caplog.text)
    assert num_starts(tmp_path, "collector-0") == 2


def test_it_gives_up_after_failures_in_a_row_without_progress(tmp_path):
    """A notice reports each restart, the error names the log and the last line; the other process has left."""
    events: list[Event] = []
    learner = "heartbeat.beat('starting'); sys.exit('the disk is full')"
    watched = supervisor(tmp_path, learner=learner, max_failures=3, on_event=events.append)
    with pytest.raises(ProcessFailedError, match="learner ended with code 1; it has failed 3 times in a row") as raised:
        watched.work(StopRequest())
    assert "Last line of stderr: the disk is full" in str(raised.value)
    assert str(tmp_path / "processes" / "learner.log") in str(raised.value)
    assert "rlhf-pipeline run --resume --out" in str(raised.value)
    assert num_starts(tmp_path, "learner") == 3
    assert events == [
        Notice(message=f"learner ended with code 1; it is restarted in {delay} s.", level="warning")
        for delay in ("0.05", "0.1")
    ]
    assert_all_gone(watched)


def test_a_mistake_is_not_tried_again(tmp_path):
    """Exit code 2 before anything worked: what was asked for is wrong, and stays wrong."""
    watched = supervisor(tmp_path, collector="print('no such device', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ProcessFailedError, match=r"collector-0 cannot start. Last line of stderr: no such device"):
        watched.work(StopRequest())
    assert num_starts(tmp_path, "collector-0") == 1


@pytest.mark.crash
def test_a_stop_is_passed_on_once_and_who_does_not_listen_is_killed(tmp_path, caplog):
    """The learner leaves as asked; the collector ignores it and is killed when its time is up."""

    class Asked(StopRequest):
        def __bool__(self) -> bool:
            return (tmp_path / "deaf").exists() and bool(read_heartbeat(tmp_path / "processes", "learner"))

    collector = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / "deaf").touch()
    time.sleep(60)
    """
    watched = supervisor(tmp_path, collector=collector, stop_timeout_s=3.0)
    assert watched.work(Asked()) == "interrupted"
    assert "learner: ended with code 143" in caplog.text
    assert re.search(r"collector-0: process \d+ is killed", caplog.text)
    assert_all_gone(watched)


ALONE = """
import os
import sys
from pathlib import Path
from rlhf_pipeline.run.processes import supervise
from rlhf_pipeline.run.processes.heartbeat import Heartbeat
from rlhf_pipeline.run.processes.launch import PLACE, Subprocesses
from rlhf_pipeline.run.processes.supervise import Supervisor, SupervisorConfig
from rlhf_pipeline.run.signals import stop_on_signals

run_dir = Path(sys.argv[1])
names = ["learner", "collector-0"]
commands = {name: [*sys.argv[2:5], str(run_dir), name, str(os.getpid())] for name in names}
with stop_on_signals() as stop:
    Supervisor(
        run_dir, commands, SupervisorConfig(), total_steps=9, heartbeat=Heartbeat(run_dir / "processes", "supervisor")
    ).work(stop)
"""


def start_alone(run_dir: Path, body: str) -> subprocess.Popen[bytes]:
    """Start a supervisor in a process of its own and wait until its two children speak."""
    (run_dir / "processes").mkdir()
    child = command(run_dir, "any", body)[:3]
    process = subprocess.Popen([sys.executable, "-c", ALONE, str(run_dir), *child], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not all(read_heartbeat(run_dir / "processes", name) for name in NAMES) and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.crash
def test_a_second_signal_kills_all_of_them(tmp_path):
    """The first one is passed on, and nobody listens; the second one is the end, within a second."""
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heartbeat.beat("collecting")
    time.sleep(60)
    """
    watched = start_alone(tmp_path, body)
    watched.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 120
    while read_heartbeat(tmp_path / "processes", "supervisor").get("state") != "stopping":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watched.send_signal(signal.SIGINT)
    _, errors = watched.communicate(timeout=120)
    assert errors.decode().rstrip().endswith("KeyboardInterrupt")
    assert not any(is_alive(tmp_path / "processes", name) for name in NAMES)


@pytest.mark.crash
def test_children_outlive_a_killed_supervisor_only_until_they_notice_and_the_next_one_waits(tmp_path, caplog):
    """They finish what they are at, half a second here, and leave; only then are their names given again."""
    body = """
    heartbeat.beat("collecting", rollouts=1)
    while not stop:
        time.sleep(0.02)
    time.sleep(0.5)
    """
    first = start_alone(tmp_path, body)
    first.kill()
    first.communicate()
    watched = supervisor(tmp_path)
    assert watched.work(StopRequest()) == "steps"
    assert caplog.text.count("already uses the name; waiting until it exits") == 2
    assert [num_starts(tmp_path, name) for name in NAMES] == [2, 2]


def test_a_run_has_one_supervisor(tmp_path):
    """The second one is told whose process id to stop, and starts nothing."""
    pipeline = definitions.find("long_running").pipeline()
    with (
        process_lock(tmp_path / "processes", "supervisor"),
        pytest.raises(RunExistsError, match=f"already has a process supervisor: {os.getpid()}"),
    ):
        supervise.supervise(Run(pipeline=pipeline, run_dir=tmp_path), SupervisorConfig())
    assert not list((tmp_path / "processes").glob("*.log"))


def test_cores_are_shared_out_unless_the_user_said_otherwise(monkeypatch):
    """Processes that each take every core are slower than processes that share them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert share_cores(1)["OMP_NUM_THREADS"] == str(cores)
    assert share_cores(10 * cores)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_cores(1)["OMP_NUM_THREADS"] == "3"


def test_settings_are_checked():
    """A value that cannot work is named."""
    with pytest.raises(DefinitionError, match=r"collectors is 0; it must be at least 1"):
        SupervisorConfig(collectors=0)
    with pytest.raises(DefinitionError, match=r"hang_timeout_s is -1; it must be at least 0 and finite"):
        SupervisorConfig(hang_timeout_s=-1)


def test_a_clock_that_jumps_back_does_not_stop_a_heartbeat(tmp_path, monkeypatch):
    """What a process says goes on being written, so that nobody takes it for one that hangs."""
    wall, steady = iter([1e9, 1e9, 1e9, 1e9 - 7200]), iter([0.0, 2.0, 2.0])
    monkeypatch.setattr(time, "time", lambda: next(wall))
    monkeypatch.setattr(time, "monotonic", lambda: next(steady))
    heartbeat = Heartbeat(tmp_path, "learner")
    heartbeat.beat("waiting")
    assert read_heartbeat(tmp_path, "learner")["time"] == 1e9
    heartbeat.beat("waiting")
    assert read_heartbeat(tmp_path, "learner")["time"] == 1e9 - 7200


def test_processes_are_numbered_in_the_order_of_their_first_starts(tmp_path):
    """So that each takes a GPU of its own, and the same one again when it is restarted."""
    launch, command = Subprocesses(), [sys.executable, "-c", f"import os, sys; sys.stderr.write(os.environ['{PLACE}'])"]
    for name in ("learner", "collector-0", "collector-1", "collector-0"):
        launch(name, command, tmp_path / f"{name}.log", {}).wait()
    said = {path.stem: path.read_text() for path in tmp_path.glob("*.log")}
    assert said == {"learner": "0", "collector-0": "11", "collector-1": "2"}


def test_a_process_that_makes_no_progress_ends_itself(tmp_path, children):
    """In one state for longer than it may be: exit code 3 and a sentence; while it waits it may take any time."""

    def stay(state: str) -> None:
        with Heartbeat(tmp_path / state, "learner", progress_timeout_s=0.2) as heartbeat:
            heartbeat.beat(state)
            time.sleep(2 * RENEWAL_S)

    states = ("waiting for a rollout", "learning")
    for state in states:
        (tmp_path / state).mkdir()
    waiting, learning = (children.fork(lambda state=state: stay(state)) for state in states)
    assert (waiting.wait(), learning.wait()) == (0, 3)
    assert "learner has been 'learning' for " in learning.output()
