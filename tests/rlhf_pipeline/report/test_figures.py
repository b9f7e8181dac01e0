"""The table of metrics names what runs write, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_pipeline import definitions
from rlhf_pipeline.report.figures import GROUPS, figures, page

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    ("collect.prompts_per_rollout", "2"),
    ("collect.group_size", "2"),
    ("policy.hidden_size", "16"),
    ("policy.num_layers", "1"),
    ("learn.steps", "3"),
    ("learn.stop_at_reward", "none"),
)
REPLAYED = (
    ("write.kl_coef", "0.1"),
    ("collect.dynamic", "2"),
    ("loss.kl_to_ref_coeff", "0.1"),
    ("learn.epochs", "2"),
    ("buffer.max_staleness", "4"),
    ("sample.strategy", "uniform"),
    ("sample.min_ess", "0.3"),
    ("learn.peak_flops", "1e12"),
)


def test_every_figure_of_a_run_is_in_the_table(tmp_path: Path):
    """Runs, plain, with KL, replay, guard and rounds, with an environment, write the table's names; all have a unit."""
    from rlhf_pipeline.run.start import run

    written: set[str] = set()
    filled: set[str] = set()
    for name, task, more in (
        ("plain", "copy_digits", ()),
        ("replayed", "copy_digits", REPLAYED),
        ("walked", "frozen_lake", (("learn.lr_schedule", "constant"),)),
    ):
        pipeline = definitions.find(task).pipeline((*SMALL, *more))
        run(pipeline, run_dir=tmp_path / name, definition=task)
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row.pop("crc32c")
            written |= row.keys()
            filled |= {key for key, value in row.items() if value is not None}
    named = {name for name in figures() if "/" in name}  # by the names of rewards and failures, if there are any
    here = (
        figures().keys() - named - {figure.name for _, group in GROUPS[-1:] for figure in group}
    )  # the last are of URLs
    assert {name for name in written if "/" not in name} == here - {"loss_kl_to_inference"}
    assert filled == written
    unitless = {"step", "evaluation/step", "rollout", "lr", "grad_norm", "advantage_std"}
    for figure in figures().values():
        assert figure.unit or figure.name in unitless or figure.name.startswith("loss"), figure.name


def test_the_page_is_printed_from_the_table():
    """docs/metrics.md is what `rlhf-pipeline config metrics --markdown` prints."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == "\n".join(page()) + "\n"
