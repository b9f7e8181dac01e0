"""Errors of weight files that cannot be written."""

from __future__ import annotations

import errno
import resource

import pytest
import torch
from safetensors.torch import save_file

from rlhf_pipeline.policies.weight_files import named_write_errors


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
