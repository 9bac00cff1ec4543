"""Reads a Hugging Face config.json as the sizes of a transformer. It is data: nothing is imported or downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.toolkit.plan.transformer import Transformer

_LIMIT = 4 * 1024 * 1024
"""Most characters of a config. Configs are a few kB; a larger file is something else."""

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_size": ("head_dim",),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
}
_UNKNOWN = {
    "is_encoder_decoder": "an encoder with a decoder",
    "kv_lora_rank": "multi-head latent attention",
    "hidden_size_per_layer_input": "embeddings in each layer",
    "num_hidden_groups": "layers that share their weights",
    "state_size": "state-space layers",
}
"""Fields of models that `Transformer` does not describe."""
_STRIDES = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")
"""Fields that are over 1 if only some layers are mixtures of experts."""
_REQUIRED = ("layers", "hidden", "heads", "vocabulary")
_LARGEST = 10**9

_GATED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo", "olmo2", "cohere", "cohere2",
    "stablelm", "modernbert",
}  # fmt: skip
_UNGATED = {"apertus", "arcee", "nanochat"}
"""Model types with RMSNorm whose feed-forward has two matrices."""
_ONE_KEY_HEAD = {"falcon", "gpt_bigcode"}
"""Model types with one key head, unless the file says otherwise (`multi_query`)."""
_LEARNED_POSITIONS = {"gpt2", "bert", "roberta", "opt", "distilbert", "electra", "gpt_bigcode", "camembert"}
_UNTIED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gpt_neox", "olmo", "olmo2", "gptj"}
"""Model types whose embeddings are not tied if the file does not say: the defaults of their classes in transformers
(some files have only what differs from these)."""
_BERTS = {"bert", "roberta", "camembert", "electra"}


def read(path: Path) -> tuple[str, Transformer]:
    """Return (name, sizes) of a config.json. Raises ConfigError."""
    content = _content(path)
    if isinstance(content.get("text_config"), dict):  # a multimodal model: the text part is the large one
        content = {**content, **content["text_config"]}
    if what := _find_unknown(content):
        raise ConfigError(f"{path}: {what}, whose sizes are not known here; give a function that builds the model")
    sizes = {ours: _size(path, content, theirs) for ours, theirs in _NAMES.items()}
    missing = [_NAMES[ours][0] for ours in _REQUIRED if not sizes[ours]]
    if missing:
        raise ConfigError(f"{path}: no {', '.join(missing)}: not the config.json of a transformer that is known here")
    if not sizes["head_size"] and sizes["hidden"] % sizes["heads"]:
        raise ConfigError(f"{path}: hidden size {sizes['hidden']} is no multiple of the {sizes['heads']} heads")
    kind = str(content.get("model_type", ""))
    if content.get("multi_query", kind in _ONE_KEY_HEAD) and not content.get("new_decoder_architecture"):
        sizes["kv_heads"] = 1
    known = {**sizes, **_mixture(path, content, kind, sizes), **_manner(content, kind, sizes)}
    return kind or path.stem, msgspec.convert(known, Transformer)


def _content(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LIMIT + 1)
        if len(text) > _LIMIT:
            raise ConfigError(f"{path}: over {_LIMIT} characters are no model's config.json")
        content = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config.json holds one object, this holds a {type(content).__name__}")
    return content


def _find_unknown(content: dict[str, Any]) -> str:
    """Return what the model has that `Transformer` does not describe, in words; empty if there is nothing."""
    layers = content.get("layer_types")
    if isinstance(layers, list) and layers:
        if other := next((str(kind) for kind in layers if not str(kind).endswith("attention")), ""):
            return f"layers of the type {other!r:.40}"
    elif content.get("mamba_d_state"):
        return "state-space layers"
    if any(isinstance(stride := content.get(name), int) and stride > 1 for name in _STRIDES):
        return "experts in some of the layers only"
    return next((what for sign, what in _UNKNOWN.items() if content.get(sign)), "")


def _mixture(path: Path, content: dict[str, Any], kind: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of a mixture of experts; empty for other models. `intermediate_size` is the width of an expert
    only where the file gives the experts no width of their own. All layers are taken for mixtures: a few may be
    dense."""
    if not sizes["experts"]:
        return {}
    width = _size(path, content, ("moe_intermediate_size",)) or sizes["feed_forward"]
    chosen = _size(path, content, ("num_experts_per_tok", "moe_k", "moe_topk")) or 1
    shared = _size(path, content, ("n_shared_experts", "moe_num_shared_experts"), least=0)
    shared = shared or kind.startswith("llama4")  # one, which the file does not name
    if width and not shared:  # or one shared expert, as wide as several
        shared = round(_size(path, content, ("shared_expert_intermediate_size",), least=0) / width)
    return {"feed_forward": width, "experts": sizes["experts"] + shared, "experts_per_token": chosen + shared}


def _size(path: Path, content: dict[str, Any], theirs: tuple[str, ...], least: int = 1) -> int:
    name = next((name for name in theirs if content.get(name) is not None), "")
    if not name:
        return 0
    value = content[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ConfigError(f"{path}: {name} is {value!r:.40}: it must be a whole number from {least} to {_LARGEST}")
    return value


def _manner(content: dict[str, Any], kind: str, sizes: dict[str, int]) -> dict[str, Any]:
    rates = [content.get(name) for name in ("hidden_dropout_prob", "resid_pdrop", "dropout", "residual_dropout")]
    silent = 0.1 if kind in {"gpt2", *_BERTS} else 0.0
    dropout = next((rate for rate in rates if isinstance(rate, int | float)), silent)
    rms = kind in _GATED or "rms_norm_eps" in content
    positions = content.get("max_position_embeddings", content.get("n_positions", 0))
    bert = kind in _BERTS
    hidden = sizes["hidden"]
    return {
        "gated": rms and kind not in _UNGATED,
        "elementary_gelu": content.get("activation_function", "gelu_new" if kind == "gpt2" else "") == "gelu_new",
        "rms": rms,
        "bias": not rms,
        "dropout": bool(dropout),
        "tied": bool(content.get("tie_word_embeddings", kind not in _UNTIED)),
        "positions": positions if kind in _LEARNED_POSITIONS and isinstance(positions, int) else 0,
        "head_dense": bert,
        "extra": (hidden * hidden + 3 * hidden + 2 * hidden + sizes["vocabulary"]) if bert else 0,
        "fused_attention": content.get("_attn_implementation") != "eager",
    }
