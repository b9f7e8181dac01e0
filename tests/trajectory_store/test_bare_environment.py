"""The store in an environment that holds NumPy and google-crc32c and nothing else: what a trainer's team installs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import trajectory_store
from trajectory_store import TrajectoryStore

STORAGE = Path(trajectory_store.__file__).resolve().parents[1]
NEEDED = ("numpy", "google-crc32c")
WORK = """
import sys
from trajectory_store import Column, Schema, TrajectoryStore, copy_rows

folder, backend = sys.argv[1:]
schema = [Column("input_ids", "int32", ragged=True), Column("reward", "float32"), Column("prompt", "str", mutable=True)]
with TrajectoryStore.create(folder, schema, backend=backend) as store:
    for part in range(3):
        store.append({"input_ids": [[1, 2, 3], [part]], "reward": [0.5, part]})
    store.update(store.ids()[:1], prompt="later")
with TrajectoryStore.open(folder, "a") as store:
    store.compact()
    assert store.where("prompt == 'later' and reward < 1").tolist() == store.ids()[:1].tolist()
    assert store.read_padded(store.ids(), ["input_ids"])["input_ids"].shape == (6, 3)
    assert store.verify().ok, store.verify()
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""


def packages(folder: Path, *names: str) -> Path:
    """Fill a folder with the files of packages, and the store."""
    for name in names:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    (folder / "trajectory_store").symlink_to(STORAGE / "trajectory_store")
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two packages that the store depends on, and the store."""
    return packages(tmp_path_factory.mktemp("packages"), *NEEDED)


def alone(bare: Path, code: str, *args: object) -> str:
    """Run code with those packages only, and return what it printed."""
    begin = f"import sys; sys.path.append({str(bare)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", begin + code, *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_is_not_there(bare: Path):
    """The environment is what it says: nothing else of this machine can be imported."""
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'zarr', 'pyarrow', 'transformers')])"
    assert alone(bare, code).strip() == "[None, None, None, None]"


def check_work(bare: Path, store_path: Path, backend: str) -> None:
    """Write, update, merge, search and verify there, and read here what was written."""
    loaded = alone(bare, WORK, store_path, backend).split()
    assert {"numpy", "google_crc32c", "trajectory_store"} <= set(loaded)
    assert not {"torch", "zarr", "obstore"} & set(loaded)
    with TrajectoryStore.open(store_path) as store:
        assert store.read(store.ids())["reward"].tolist() == [0.5, 0.0, 0.5, 1.0, 0.5, 2.0]


def test_a_store_in_a_folder_needs_nothing_else(bare: Path, tmp_path: Path):
    """Everything on raw segments works with NumPy and google-crc32c."""
    check_work(bare, tmp_path / "store", "memmap")


def test_the_zarr_backend_needs_a_codec_and_no_zarr(tmp_path: Path):
    """Compressed objects need numcodecs, whose metadata asks for more than its codec imports."""
    found = packages(tmp_path, *NEEDED, "numcodecs", "typing_extensions")
    check_work(found, tmp_path / "store", "zarr")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("create(f, s, backend='zarr').append({'x': [1] * 9000})", "'trajectory-store[zarr]'"),
        ("create('s3://bucket/store', s)", "'trajectory-store[s3]'"),
        ("create(f, s).to_arrow()", "'trajectory-store[arrow]'"),
    ],
)
def test_what_is_missing_is_named_with_its_command(bare: Path, tmp_path: Path, code: str, told: str):
    """A form that needs another package says what to type, as an error of the store and an ImportError."""
    code = (
        "from trajectory_store import Column, StoreError, TrajectoryStore\n"
        "create, f, s = TrajectoryStore.create, sys.argv[1], [Column('x', 'int64')]\n"
        f"try:\n    {code}\nexcept (StoreError, ImportError) as error:\n"
        "    print(isinstance(error, StoreError), isinstance(error, ImportError), error)"
    )
    assert alone(bare, code, tmp_path / "store").startswith("True True ")
    assert f"pip install {told}" in alone(bare, code, tmp_path / "other")


def test_the_recorder_needs_nothing_else(bare: Path, tmp_path: Path):
    """Another trainer's rollouts are recorded where there is no torch and no rlhf-pipeline, and read here."""
    code = (
        "from trajectory_store.recorder import TrajectoryRecorder\n"
        "with TrajectoryRecorder(sys.argv[1], group_size=2) as recorder:\n"
        "    recorder.record(prompt_ids=[[1, 2], [1, 2]], completions=['', ''], completion_ids=[[3], [4, 5]],\n"
        "                    rewards=[1.0, 0.0], log_probs=[[-0.5], [-1.0, -2.0]], policy_version=3)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    loaded = alone(bare, code, tmp_path / "store").split()
    assert not {"torch", "zarr", "rlhf_pipeline", "transformers", "jinja2"} & set(loaded)
    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids(), ["input_ids", "log_probs", "task_reward", "group_id", "policy_version"])
    assert [row.tolist() for row in rows["input_ids"]] == [[1, 2, 3], [1, 2, 4, 5]]
    assert rows["log_probs"][1][2:].tolist() == [-1.0, -2.0]
    assert (rows["task_reward"].tolist(), rows["group_id"].tolist()) == ([1.0, 0.0], [0, 0])
    assert rows["policy_version"].tolist() == [3, 3]
