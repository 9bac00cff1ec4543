"""`sentinel plan` as users and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.toolkit.plan.transformer import Transformer

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def called(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def strategies(*arguments: str) -> dict[str, Any]:
    return {found["strategy"]: found for found in json.loads(called(*arguments, "--json").output)}


def test_json_has_bytes_of_each_strategy() -> None:
    found = strategies("--params", "7.5e9", "--gpus", "64")
    for name, total in (("DDP", 120e9), ("ZeRO-1", 31.4e9), ("ZeRO-2", 16.6e9), ("ZeRO-3 / FSDP", 1.9e9)):
        memory = found[name]["per_gpu"]
        assert memory["total"] == pytest.approx(total, rel=0.02)
        parts = ("parameters", "gradients", "optimizer", "activations", "gathered")
        assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))


def test_strategies_that_fit_come_first_and_of_those_the_ones_that_change_no_training() -> None:
    found = list(strategies("--params", "7.5e9", "--gpus", "64").values())
    keys = [(not row["fits"], row["fits"] and row["changes_training"]) for row in found]
    assert keys == sorted(keys)
    assert found[0]["strategy"] == "ZeRO-1"
    assert not strategies("--params", "7.5e9", "--gpus", "64")["DDP"]["fits"]


def test_each_figure_has_its_formula_and_source_and_the_page_80_columns(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    page = called(str(tmp_path / "config.json"), "--gpus", "8", "--batch", "8", "--sequence", "4096").output
    assert max(map(len, page.splitlines())) <= 80
    for word in ("parameters", "gradients", "optimizer", "gathered", "activations", "communication", "arXiv"):
        assert word in page
    assert "8.03 B parameters" in page
    page = called("--params", "7.5e9", "--layers", "32", "--hidden", "4096", "--gpus", "1024", "--gpu", "a100").output
    assert max(map(len, page.splitlines())) <= 80


def test_a_batch_that_does_not_fit_is_accumulated_or_checkpointed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = (str(tmp_path / "config.json"), "--gpus", "8", "--batch", "16", "--sequence", "4096")
    chosen = strategies(*arguments)["ZeRO-3 / FSDP"]
    assert chosen["fits"]
    assert chosen["accumulation"] > 1
    whole = strategies(*arguments, "--no-checkpointing", "--micro-batch", "16")["ZeRO-3 / FSDP"]
    assert not whole["fits"]
    assert whole["per_gpu"]["activations"] > 4 * chosen["per_gpu"]["activations"]


def test_qlora_is_as_computed_by_hand() -> None:
    """Matrices in 4 bits and 0.127 bits of constants (arXiv 2305.14314, section 3), all else as in LoRA."""
    sizes = ("--layers", "32", "--hidden", "4096", "--heads", "32", "--vocab", "32000", "--lora-rank", "16")
    matrices = 32 * (4 * 4096**2 + 2 * 4096 * 16384)
    biases_and_norms = 32 * (4 * 4096 + 16384 + 4096 + 4 * 4096) + 2 * 4096
    adapters = 32 * 16 * (4 * (4096 + 4096) + 2 * (4096 + 16384))
    found = strategies(*sizes, "--gpus", "8")["DDP + QLoRA"]
    assert found["changes_training"]
    memory = found["per_gpu"]
    other = 2 * (32000 * 4096 + biases_and_norms + adapters)
    assert memory["parameters"] == pytest.approx(matrices * (4 + 0.127) / 8 + other, rel=1e-4)
    assert memory["gradients"] == pytest.approx(2 * adapters)
    assert memory["optimizer"] == pytest.approx((4 + 8) * adapters)
    assert memory["gathered"] == 2 * 4096 * 16384


def test_qlora_brings_65_b_parameters_from_780_gb_to_less_than_48(tmp_path: Path) -> None:
    """Section 1 of the QLoRA paper (arXiv 2305.14314) says so of LLaMA-65B."""
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64}
    config = {**LLAMA, **sizes, "intermediate_size": 22016, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = strategies(str(tmp_path / "config.json"), "--sequence", "512", "--checkpointing")
    assert found["one GPU"]["per_gpu"]["total"] > 780e9
    assert found["one GPU + QLoRA"]["per_gpu"]["total"] < 48e9
    assert next(iter(found)) == "one GPU + QLoRA"


PUBLISHED = {
    "falcon-7b": (6.92e9, {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "vocab_size": 65024, "multi_query": True, "num_kv_heads": 71,
    }),
    "falcon-40b": (41.3e9, {
        "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
        "vocab_size": 65024, "multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True,
    }),
    "starcoder": (15.5e9, {
        "model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
        "n_positions": 8192, "vocab_size": 49152,
    }),
    "OLMo-7B": (6.89e9, {
        "model_type": "olmo", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "vocab_size": 50304,
    }),
    "stablelm-2-1_6b": (1.64e9, {
        "model_type": "stablelm", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "intermediate_size": 5632, "vocab_size": 100352, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
    }),
    "c4ai-command-r7b": (8.03e9, {
        "model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 256000, "layer_norm_eps": 1e-5,
        "layer_types": ["sliding_attention", "full_attention"] * 16,
    }),
    "AFM-4.5B": (4.62e9, {
        "model_type": "arcee", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 18432, "vocab_size": 128004,
        "hidden_act": "relu2", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }),
    "Llama-4-Scout": (107.8e9, {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "vocab_size": 202048, "num_local_experts": 16, "interleave_moe_layer_step": 1, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }),
    "ERNIE-4.5-21B-A3B": (21.8e9, {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_num_experts": 64,
        "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_interval": 1, "vocab_size": 103424, "rms_norm_eps": 1e-5,
    }),
}  # fmt: skip
"""Parameters of text models, as counted in transformers' modules, and what their configs say."""


@pytest.mark.parametrize("model", list(PUBLISHED))
def test_the_parameters_of_a_config_are_those_of_the_model(model: str, tmp_path: Path) -> None:
    parameters, config = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(config))
    bytes_of_two_each = strategies(str(tmp_path / "config.json"))["one GPU"]["per_gpu"]["parameters"]
    assert bytes_of_two_each / 2 == pytest.approx(parameters, rel=0.04)


def test_the_time_of_a_mixture_is_that_of_the_experts_that_a_token_goes_through(tmp_path: Path) -> None:
    seconds = []
    for config in (LLAMA, {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        arguments = (str(tmp_path / "config.json"), "--sequence", "4096", "--gpu-memory", "10TB", "--no-checkpointing")
        seconds.append(strategies(*arguments)["one GPU"]["seconds"])
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)


def test_attention_with_dropout_is_fused_on_a_gpu_and_not_on_a_cpu() -> None:
    sizes = Transformer(layers=1, hidden=64, heads=16, vocabulary=100)

    def held_in_backward(**more: bool) -> float:
        known = msgspec.structs.replace(sizes, **more)
        return known.profile(4096, 2, checkpointed=False, autocast=False).points[2].activations

    assert held_in_backward(dropout=True) == held_in_backward()
    assert held_in_backward(dropout=True, on_cpu=True) > held_in_backward(on_cpu=True)


def test_memory_left_is_for_activations_if_those_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = (str(tmp_path / "config.json"), "--gpus", "8")
    page = called(*arguments).output
    rows = [line for line in page.splitlines() if line[:4].strip().isdigit()]
    assert rows
    assert all(row[-24:-16].strip() == "?" for row in rows)
    assert page.count(" left for activations") == len(rows)
    assert " left for activations" not in called(*arguments, "--sequence", "512").output


def test_where_nothing_fits_the_exit_code_is_1_and_tensor_parallel_is_named() -> None:
    done = called("--params", "70B", "--gpu-memory", "16GB")
    assert done.exit_code == 1
    assert "tensor parallel" in done.output
    assert "too large for each GPU" in " ".join(done.output.split())


def test_a_module_is_built_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huge.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(1_000_000, 100_000)), (torch.randn(2, 1_000_000),)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = called("huge:build", "--gpus", "64", "--json")
    assert json.loads(done.output)[0]["fits"] in (True, False)
    assert any(row["per_gpu"]["parameters"] >= 2e11 for row in json.loads(done.output))


BAD_CONFIGS = {
    "a list": ("[1, 2]", "holds one object"),
    "no JSON": ("{'hidden_size': 4}", "not JSON"),
    "nested without end": ("[" * 200_000, "not JSON"),
    "too large": ('{"a": "' + "x" * (5 * 1024 * 1024) + '"}', "are no model's config.json"),
    "no sizes": ('{"model_type": "resnet"}', "no num_hidden_layers, hidden_size"),
    "text for a number": (json.dumps({**LLAMA, "hidden_size": "4096; rm -rf /"}), "hidden_size is '4096"),
    "a huge number": (json.dumps({**LLAMA, "num_hidden_layers": 10**30}), "from 1 to"),
    "negative": (json.dumps({**LLAMA, "vocab_size": -1}), "vocab_size is -1"),
    "heads that do not divide": (json.dumps({**LLAMA, "num_attention_heads": 7}), "no multiple of the 7 heads"),
    "an encoder with a decoder": (json.dumps({**LLAMA, "is_encoder_decoder": True}), "give a function that builds"),
    "state-space layers": (json.dumps({**LLAMA, "mamba_d_state": 16}), "state-space layers"),
    "convolutions": (json.dumps({**LLAMA, "layer_types": ["conv", "full_attention"]}), "layers of the type 'conv'"),
    "experts in half of the layers": (
        json.dumps({**LLAMA, "num_local_experts": 128, "interleave_moe_layer_step": 2}),
        "experts in some of the layers only",
    ),
    "shared layers": (json.dumps({**LLAMA, "num_hidden_groups": 1}), "layers that share their weights"),
    "latent attention": (json.dumps({**LLAMA, "kv_lora_rank": 512}), "multi-head latent attention"),
    "bytes": ("\udcff\udcfe", "cannot be read"),
}


@pytest.mark.parametrize("fault", list(BAD_CONFIGS))
def test_a_bad_config_is_a_sentence(fault: str, tmp_path: Path) -> None:
    text, said = BAD_CONFIGS[fault]
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    error = called(str(path)).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to plan"),
        (("--params", "many"), "'many' is not a number"),
        (("--params", "-5"), "'-5' is not a number"),
        (("--params", "1e40"), "out of range"),
        (("--params", "nan"), "'nan' is not a number"),
        (("--params", "1e9", "--gpus", "0"), "Invalid value for '--gpus'"),
        (("--params", "1e9", "--gpu", "h1000"), "'h1000' is not one of"),
        (("--params", "1e9", "--gpu-memory", "80 parsecs"), "'80 parsecs' is not a size"),
        (("--params", "1e9", "--precision", "int3"), "'int3' is not one of"),
        (("--params", "1e9", "config.json"), "not both"),
        (("--layers", "4", "--hidden", "100", "--heads", "3"), "no multiple of 3 heads"),
        (("/no/such/config.json",), "cannot be read"),
        (("no.such.module:build",), "cannot be imported"),
        (("json:nothing",), "module json has no nothing"),
        (("json:__name__",), "is a str"),
        (("json:dumps",), "does not build on fake tensors"),
        (("os:getcwd",), "a torch module"),
        (("torch.nn:Identity", "--input", "8xlong"), "write it as 8x128:int64"),
        (("torch.nn:Identity", "--input", "2x2:int64"), "cannot take a step"),
        (("--params", "1e9", "--jsno"), "No such option"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_wrong_use_is_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    done = called(*arguments)
    assert said in done.output + str(done.exception)
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
