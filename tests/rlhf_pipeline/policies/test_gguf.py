"""Models from GGUF files: loaded, written as a folder, trained from and resumed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_pipeline import CausalLMPolicy, PretrainedPolicy, Prompts
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, MissingPathError, RunMismatchError
from rlhf_pipeline.policies.model_source import resolve_source
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import changed, tiny

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

_ENDS = ["<|pad|>", "<|end|>"]


def interleaved(weight, heads):
    """Order the rows of a query or key projection as GGUF stores them: the two halves of each head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a tiny Llama and the GGUF file of its weights and of a byte-level tokenizer."""
    alphabet = [*(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab", "cd"]
    tokens = [*_ENDS, *alphabet]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_context_length(128)
    file.add_embedding_length(32)
    file.add_block_count(2)
    file.add_feed_forward_length(64)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_dimension_count(8)
    file.add_rope_freq_base(10_000.0)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokens)
    file.add_token_types([3, 3, *[1] * len(alphabet)])
    file.add_token_merges(["a b", "c d"])  # one alone is no list to transformers 5.17
    file.add_eos_token_id(1)
    file.add_bos_token_id(1)
    file.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            value = interleaved(value, 4 if "q_proj" in name else 2)
        file.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(value))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model, path


@torch.no_grad()
def test_a_gguf_file_is_a_model_and_can_be_written_as_a_folder(made, tmp_path):
    """The logits of the file, and those of the folder made from it, equal those of the model that was written."""
    model, path = made
    ids = torch.arange(2, 12)[None]
    expected = model(ids).logits
    loaded = CausalLMPolicy.from_pretrained(path)
    torch.testing.assert_close(loaded.model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert loaded.tokenizer.encode("a1") == [2 + ord("a") - 33, 2 + ord("1") - 33]

    assert main(["new-model", str(tmp_path / "model"), "--gguf", str(path)]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    folder = CausalLMPolicy.from_pretrained(tmp_path / "model")
    assert torch.equal(folder.model(ids).logits, loaded.model(ids).logits)
    assert folder.tokenizer.encode("sum 12") == loaded.tokenizer.encode("sum 12")


def test_what_is_no_gguf_file_is_refused_by_name(tmp_path):
    """A file that is absent, and one of another kind under this name."""
    with pytest.raises(MissingPathError, match="no GGUF file at"):
        resolve_source(tmp_path / "absent.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"begins with b'PK\\x03\\x04'"):
        resolve_source(tmp_path / "other.gguf")


def test_a_run_starts_from_a_gguf_file_and_refuses_another_under_its_name(made, tmp_path):
    """One step from the file, another on a resume; then a file with other weights."""
    path = tmp_path / "model.gguf"
    path.write_bytes(made[1].read_bytes())
    definition = replace(
        tiny(reward=starts_with_a, learn__steps="1", learn__epochs="1"),
        policy=PretrainedPolicy(path=str(path)),
        prompts=Prompts(rows=[{"question": text, "answer": ""} for text in ("sum", "of", "two")], as_chat=False),
    )
    run(definition, run_dir=tmp_path / "run")
    run(changed(definition, learn__steps="2"), run_dir=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors").is_file()
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(RunMismatchError, match=r"policy\.path.* has changed since"):
        run(changed(definition, learn__steps="3"), run_dir=tmp_path / "run", resume=True)


def starts_with_a(completion: str) -> float:
    """Return 1.0 for completions that start with a character from the first half of the alphabet."""
    return float(completion[:1] < "P")


def test_a_folder_of_adapters_is_no_model_and_reports_what_to_do(tmp_path):
    """The folder of a LoRA checkpoint as `policy.path`: go on from its run, or merge it."""
    folder = tmp_path / "lora" / "checkpoints" / "step-00000200"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"--from \S+lora@200\. .*\(merge_and_unload"):
        resolve_source(folder)
