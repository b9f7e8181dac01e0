"""Errors of weight files that cannot be written."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rlhf_pipeline.errors import RunStorageError
from rlhf_pipeline.policies.weight_files import named_write_errors
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.folder import RunFolder


@pytest.fixture
def small_files():
    """A limit of 64 KB for the files of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_is_too_large_is_an_oserror(tmp_path, small_files):
    """The library's own error type hides the number by which a full disk is told from a missing folder."""
    with pytest.raises(OSError, match="File too large") as caught, named_write_errors(tmp_path):
        save_file({"a": torch.zeros(300_000)}, tmp_path / "a.safetensors")
    assert caught.value.errno == errno.EFBIG


def test_a_missing_folder_is_an_oserror(tmp_path):
    """The number is that of the system, and the message has no words of the library."""
    with pytest.raises(FileNotFoundError, match="No such file or directory"), named_write_errors(tmp_path):
        save_file({"a": torch.zeros(3)}, tmp_path / "missing" / "a.safetensors")


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "Free disk space"), (errno.EACCES, "--out OTHER_FOLDER"), (errno.EFBIG, "Fix the problem")],
)
def test_a_run_reports_what_to_do_about_weights_that_cannot_be_written(tmp_path, number, advice):
    """The library names the error of the system in words; the run's sentence has the advice for it."""
    run = RunFolder(tmp_path)
    with pytest.raises(RunStorageError, match=advice), named_disk_errors(run), named_write_errors(tmp_path / "a"):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
