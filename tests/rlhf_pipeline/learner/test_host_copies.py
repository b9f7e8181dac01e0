"""Copies of tensors in host memory that is used again."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.learner import host_copies
from rlhf_pipeline.learner.host_copies import HostCopies, available_bytes
from rlhf_pipeline.learner.state import LearnerState, StateCopy
from tests.moments import at_call, fails
from tests.rlhf_pipeline.small import leave_memory


def test_a_copy_keeps_its_values_and_its_memory():
    """Changes of the tensors do not reach it; the next copy takes the same memory, and new memory for new shapes."""
    weight, moments = torch.arange(4.0), torch.ones(2, dtype=torch.bfloat16)
    copies = HostCopies()
    assert copies.bytes_missing({"weight": weight, "moments": moments}) == 16 + 4
    first = copies.of({"weight": weight, "moments": moments})
    weight.add_(1.0)
    assert first["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert copies.bytes_missing({"weight": weight, "moments": moments}) == 0
    assert copies.bytes_missing({"weight": weight, "moments": torch.ones(3)}) == 12
    second = copies.of({"weight": weight, "moments": torch.ones(3)})
    assert second["weight"].data_ptr() == first["weight"].data_ptr()
    assert second["weight"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert second["moments"].dtype == torch.float32


def test_tied_tensors_stay_tied_and_empty_ones_are_apart():
    """A tied head has one copy, which safetensors then saves once; views of one memory with other shapes have two."""
    weight = torch.arange(4.0)
    copied = HostCopies().of({"a": weight, "b": weight.detach(), "c": weight[:2], "d": torch.ones(0)})
    assert copied["a"] is copied["b"]
    assert copied["a"].data_ptr() != copied["c"].data_ptr()
    assert copied["d"].shape == (0,)


@pytest.mark.parametrize(("available", "fits"), [(7.0, False), (8.0, True)])
def test_copies_take_at_most_half_of_what_is_available(monkeypatch, available, fits):
    """Four bytes need eight that are available; memory that is there already needs none."""
    leave_memory(monkeypatch, available)
    copies = HostCopies()
    assert copies.fit({"a": torch.ones(1)}) is fits
    copies.of({"a": torch.ones(1)})
    leave_memory(monkeypatch, 0.0)
    assert copies.fit({"a": torch.ones(1)})


def test_the_limit_of_a_container_counts(tmp_path):
    """The machine has 1 MiB, the container 300,000 bytes of which 200,000 are in use, 50,000 of those for files."""
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 1024 kB\n")
    assert available_bytes(tmp_path / "none", tmp_path) == float("inf")
    assert available_bytes(tmp_path, tmp_path / "none") == 1024 * 1024
    for name, text in (("max", "300000\n"), ("current", "200000\n"), ("stat", "anon 150000\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert available_bytes(tmp_path, tmp_path) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 1024 * 1024


def state_of(weight: torch.Tensor) -> LearnerState:
    """A learner's state of one tensor in a file."""
    policy = scratch_policy("01", hidden_size=4, num_layers=1, num_heads=1, seed=0)
    return LearnerState(policy=policy, weights={}, frozen=(), files={"optimizer": {"weight": weight}})


def test_a_copy_is_made_once_by_whoever_needs_it_first():
    """The learner makes it before it changes its state, and the thread takes the same one."""
    weight = torch.ones(2)
    copy = StateCopy(state_of(weight), HostCopies())
    copy.settle()
    weight.fill_(2.0)
    copy.settle()
    assert copy.state().files["optimizer"]["weight"].tolist() == [1.0, 1.0]


def test_a_copy_that_fails_lets_the_learner_go_on():
    """Its failure is that of the checkpoint: the thread that writes it raises it."""
    copy = StateCopy(state_of(torch.ones(2)), HostCopies())
    with at_call(host_copies._memory_for, before=fails(RuntimeError("no memory"))):
        copy.settle()
    with pytest.raises(RuntimeError, match="no memory"):
        copy.state()


def test_memory_that_cannot_be_locked_is_used_all_the_same(monkeypatch):
    """A system may lock less memory than it has."""
    empty, tries = torch.empty, list[bool]()

    def refuse(*shape: int, pin_memory: bool | None = None, **more: object) -> torch.Tensor:
        tries.append(pin_memory is not None)
        if tries[-1]:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    assert HostCopies().of({"a": torch.ones(2)})["a"].tolist() == [1.0, 1.0]
    assert tries == [True, False]
