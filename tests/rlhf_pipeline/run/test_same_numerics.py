"""A resumed run computes as the started one: nothing that determines the last bits of a step differs."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rlhf_pipeline import Pipeline, PretrainedPolicy, override, scratch_policy
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.record import machine
from rlhf_pipeline.run.start import run
from tests.moments import Call, at_call
from tests.rlhf_pipeline.small import tiny

_FLAGS = {
    "float32 products": torch.get_float32_matmul_precision,
    "TF32 of matrices": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 of cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "reduced sums in bfloat16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "attention by matrix products": torch.backends.cuda.math_sdp_enabled,
    "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "autocast": torch.is_autocast_enabled,
    "default dtype": torch.get_default_dtype,
    "threads": torch.get_num_threads,
}

_NAMES = {"_name_or_path", "architectures", "dtype"}
"""Of a config, what saving a model sets and only loading one reads."""


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """What a kernel is chosen by, beside the values."""
    return (
        tensor.dtype, tensor.device.type, tuple(tensor.shape), tensor.stride(), tensor.storage_offset() % 16,
        tensor.requires_grad,
    )  # fmt: skip


def numerics(learner: Learner) -> dict[str, object]:
    """Everything that determines the numbers of the next step."""
    policy, model = learner.policy, cast(Any, learner.policy.model)
    found: dict[str, object] = {name: flag() for name, flag in _FLAGS.items()}
    first: dict[int, str] = {}
    for kind, tensors in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        for name, tensor in tensors(remove_duplicate=False):
            found[f"{kind} {name}"] = (*_form(tensor), "same as", first.setdefault(id(tensor), name))
            found[f"values of {name}"] = tensor.detach().double().flatten().tolist()
    for name, module in model.named_modules():
        switches = (module.training, getattr(module, "gradient_checkpointing", None))
        found[f"module {name}"] = (type(module).__qualname__, *switches, sorted(vars(module)))
        hooks: Any = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found[f"hooks of {name}"] = [len(one) for one in hooks]
    config = model.config.to_dict()
    found["config"] = {name: value for name, value in config.items() if name not in _NAMES}
    found["attention"] = model.config._attn_implementation
    found["policy"] = (
        policy.training,
        policy.temperature,
        policy.num_slots,
        policy.max_positions,
        policy.eos_token_ids,
    )
    scorer = policy._scorer
    found["layout"] = (scorer.layout, scorer.in_use, policy.planned_layout)
    found["layouts computed"] = policy.take_computed()
    inner = learner.optimizer.inner
    found["optimizer"] = (type(inner).__qualname__, sorted(inner.defaults.items()))
    for name, tensor in learner.optimizer.stepped.items():
        found[f"stepped {name}"] = (name in learner.optimizer.masters, *_form(tensor))
        found[f"values stepped {name}"] = tensor.detach().flatten().tolist()
        for moment, value in inner.state.get(tensor, {}).items():
            found[f"{moment} of {name}"] = (_form(value), value.flatten().tolist())
    for number, group in enumerate(inner.param_groups):
        found[f"group {number}"] = sorted((key, value) for key, value in group.items() if key != "params")
    return found


def _scratch(folder: Path) -> Pipeline:
    return tiny(policy__num_layers="2")


def _in_bfloat16(folder: Path) -> Pipeline:
    scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0).save_pretrained(folder / "model")
    return replace(tiny(), policy=PretrainedPolicy(path=str(folder / "model"), dtype="bfloat16"))


def _with_adapters(folder: Path) -> Pipeline:
    return override(tiny(), "policy.lora_rank", "2")


def _recomputed(folder: Path) -> Pipeline:
    return override(_in_bfloat16(folder), "learn.activation_checkpointing", "true")


def _shared(folder: Path) -> Pipeline:
    return override(_in_bfloat16(folder), "learn.layout", "prefix_shared")


@pytest.mark.parametrize("make", [_scratch, _in_bfloat16, _with_adapters, _recomputed, _shared])
def test_a_resumed_policy_computes_as_the_started_one(tmp_path, make):
    """After step 4 of six: dtypes, memory forms, ties, switches, flags, config, layout, optimizer, and all values."""
    pipeline = make(tmp_path)
    seen: list[dict[str, object]] = []

    def look(call: Call) -> None:
        if call.arguments["step"] == 4:
            seen.append(numerics(call.arguments["self"]))

    with at_call(Learner.step, before=lambda call: call.arguments["self"].policy.take_computed(), after=look):
        run(pipeline, run_dir=tmp_path / "straight")
        run(override(pipeline, "learn.steps", "3"), run_dir=tmp_path / "resumed")
        run(pipeline, run_dir=tmp_path / "resumed", resume=True)
    started, resumed = seen
    assert started.keys() == resumed.keys()
    differing = {name: (started[name], resumed[name]) for name in started if started[name] != resumed[name]}
    assert not differing


def test_a_machine_that_lists_no_processors_has_a_name_for_them():
    """Where `/proc/cpuinfo` cannot be read, the name of the architecture is recorded."""

    def fail(call: Call) -> None:
        if call.arguments["self"] == Path("/proc/cpuinfo"):
            raise PermissionError

    with at_call(Path.read_text, before=fail) as reads:
        assert machine()["processor"] in {platform.processor(), platform.machine()} - {""}
    assert len(reads) == 1
