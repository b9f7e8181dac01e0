"""The watchers of the other tests, where there is no GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.rlhf_pipeline.functional.watch import no_waits


@pytest.mark.parametrize("fails", [False, True])
def test_the_debug_mode_is_restored_although_torch_warns(monkeypatch, fails):
    """Changing the mode warns, and warnings are errors here: the next test must find the mode as it was."""
    modes: list[object] = [0]

    def change(mode: object) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", change)
    if fails:
        with pytest.raises(ValueError, match="inside"), no_waits():
            raise ValueError("inside")
    else:
        with no_waits():
            assert modes[-1] == "error"
    assert modes == [0, "error", 0]
