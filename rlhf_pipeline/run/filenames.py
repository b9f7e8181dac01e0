"""The names of a run's files and folders, the same in a folder and at a URL; `run.folder` tells what they are."""

from __future__ import annotations

from typing import Final

CONFIG: Final = "config.json"
STORE: Final = "store"
LEDGER: Final = "ledger.jsonl"
METRICS: Final = "metrics.jsonl"
CHECKPOINTS: Final = "checkpoints"
LOG: Final = "log.txt"
LOGS: Final = "logs"
REPORT: Final = "report.html"
CHOICE: Final = "gather.json"
CHOICE_TABLE: Final = "gather.npy"
RECORDED_LEDGER: Final = "recorded_ledger.jsonl"
ROLLOUTS: Final = "rollouts"
WEIGHTS: Final = "weights"
NEWEST_WEIGHTS: Final = "latest.json"
"""In `WEIGHTS`."""
CLAIMS: Final = "claims"
PROCESSES: Final = "processes"
SUPERVISOR_LOG: Final = "supervisor.log"
GROUP: Final = "group.json"
LOCK: Final = "lock"
SETUP_LOCK: Final = "setup.lock"
SOURCE: Final = "definition"
INPUTS: Final = "inputs"
