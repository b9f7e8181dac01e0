"""Other tools' data: rollouts from elsewhere into a store, a store to Parquet and datasets, recording other trainers.

- `import_files`: JSONL, Parquet, Hugging Face datasets; dumps of TRL, verl, open-instruct, prime-rl, tinker-cookbook.
- `copy_store`: a store, whole or in part, into a new one of either backend.
- `follow_folder`: the same of what a running trainer writes.
- `export_store`: Parquet, JSONL, Hugging Face datasets, which are imported again without loss; ATIF.
- `TrajectoryRecorder`: inside TRL's trainers, or any loop that has token ids and rewards.
- `select`: conditions such as `reward>=0.5`.

pyarrow and datasets are optional and imported when they are needed: `pip install 'rlhf-pipeline[exchange]'`.
"""

from __future__ import annotations

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.exchange.copier import copy_store
from rlhf_pipeline.exchange.exporter import ExportReport, export_store
from rlhf_pipeline.exchange.follow import follow_folder
from rlhf_pipeline.exchange.importer import FileReport, ImportReport, import_files
from trajectory_store.recorder import TrajectoryRecorder

__all__ = [
    "ExportReport",
    "FileReport",
    "ImportReport",
    "TrajectoryRecorder",
    "copy_store",
    "export_store",
    "follow_folder",
    "import_files",
    "select",
]
