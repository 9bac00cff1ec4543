"""`sentinel precision`: its counts equal those of a real cast; malicious files are refused."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import struct
import zipfile
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.signals import below
from sentinel.store.writer import Store
from sentinel.toolkit.precision import checkpoint
from sentinel.toolkit.precision.advice import findings
from sentinel.toolkit.precision.magnitudes import FLOAT16, best_scale


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["precision", *map(str, arguments)])


def saved(path: Path, weights: dict[str, torch.Tensor], optimizer: Any = None) -> Path:
    torch.save({"model": weights, **({"optimizer": optimizer} if optimizer else {})}, path)
    return path


def trained(scale: float = 1.0, rate: float = 1e-3, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a linear layer after ten steps of AdamW on gradients of about `scale`, and the optimizer's state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=0.0, weight_decay=0.0)
    for _ in range(10):
        for p in model.parameters():
            p.grad = torch.randn_like(p) * scale
        optimizer.step()
    return model, optimizer.state_dict()


def test_shares_are_those_of_a_real_cast(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = torch.randn(100_000) * torch.exp2(torch.randint(-40, 10, (100_000,)).float())
    (tensor,) = checkpoint.read(saved(tmp_path / "c.pt", {"w": weights}))
    cast = weights.half()
    assert tensor.weights.share_under(FLOAT16.zero) == pytest.approx(float((cast == 0).float().mean()), abs=1e-4)
    subnormal = (cast != 0) & (cast.abs() < 2**-14)
    share = tensor.weights.share_under(FLOAT16.normal) - tensor.weights.share_under(FLOAT16.zero)
    assert share == pytest.approx(float(subnormal.float().mean()), abs=1e-3)
    assert tensor.weights.total == 100_000


def test_the_scale_keeps_gradients_that_vanish_without_it(tmp_path: Path) -> None:
    model, state = trained(scale=2.0**-30)
    tensors = checkpoint.read(saved(tmp_path / "c.pt", model.state_dict(), state))
    gradients = tensors[0].gradients
    assert gradients is not None
    assert gradients.share_under(FLOAT16.zero) > 0.9
    assert gradients.share_under(FLOAT16.zero, best_scale(gradients)) < 0.001
    (finding,) = [f for f in findings(tensors) if "loss scale" in f.what]
    assert "GradScaler(init_scale=2.0**" in finding.do


@pytest.mark.parametrize(("rate", "lost"), [(1e-2, False), (1e-7, True)])
def test_lost_updates_are_those_that_a_real_bfloat16_weight_does_not_feel(
    rate: float, lost: bool, tmp_path: Path
) -> None:
    model, state = trained(rate=rate)
    weight = model.weight.detach()
    (tensor, *_) = checkpoint.read(saved(tmp_path / "c.pt", model.state_dict(), state))
    assert tensor.lost is not None
    entry = state["state"][0]
    update = rate * (entry["exp_avg"] / (1 - 0.9**10)) / (entry["exp_avg_sq"] / (1 - 0.999**10)).sqrt()
    kept = (weight.bfloat16() - update.bfloat16() != weight.bfloat16()).float().mean()
    assert tensor.lost == pytest.approx(1 - float(kept), abs=0.1)
    assert any("bfloat16 weights" in finding.what for finding in findings([tensor])) == lost


@pytest.mark.parametrize("kinds", [("weight", "bias"), ("bias", "weight")])
def test_gradients_are_those_of_their_tensors_in_each_parameter_group(kinds: tuple[str, str], tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    groups = [{"params": [p for name, p in model.named_parameters() if name.endswith(kind)]} for kind in kinds]
    optimizer = torch.optim.AdamW(groups)
    for power, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 1.5 * 2.0**-power)
    optimizer.step()
    tensors = checkpoint.read(saved(tmp_path / "c.pt", model.state_dict(), optimizer.state_dict()))
    powers = [tensor.gradients and tensor.gradients.highest for tensor in tensors]
    assert powers == [-power for power in range(6)]


def stepped(model: torch.nn.Module, *, named: bool) -> Any:
    """Return the state of AdamW after a step of the parameters that are not frozen: the gradients of the last one are
    far smaller than the others'."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained if named else [p for _, p in trained])
    for _, p in trained:
        p.grad = torch.ones_like(p)
    trained[-1][1].grad = torch.full_like(trained[-1][1], 2.0**-30)
    optimizer.step()
    return optimizer.state_dict()


def layers(*, frozen: int) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    return model


def gradients_lost(path: Path) -> dict[str, float | None]:
    return {row["tensor"]: row["gradient_fp16_zero"] for row in json.loads(called(path, "--json").output)["tensors"]}


def test_the_state_of_trained_layers_is_not_taken_for_that_of_frozen_ones(tmp_path: Path) -> None:
    model = layers(frozen=2)
    path = saved(tmp_path / "c.pt", model.state_dict(), stepped(model, named=False))
    found = gradients_lost(path)
    assert {found.pop(f"{at}.weight") for at in range(4)} == {None}
    assert found == {"parameter 0 of the optimizer": 0.0, "parameter 1 of the optimizer": 1.0}
    assert "50.0% of typical gradients become zero" in " ".join(called(path).output.split())


def test_an_optimizer_with_names_says_whose_its_states_are(tmp_path: Path) -> None:
    model = layers(frozen=2)
    found = gradients_lost(saved(tmp_path / "c.pt", model.state_dict(), stepped(model, named=True)))
    assert found == {"0.weight": None, "1.weight": None, "2.weight": 0.0, "3.weight": 1.0}


def test_statistics_of_batch_norms_and_tied_weights_have_no_state(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.BatchNorm1d(8), "b": torch.nn.BatchNorm1d(8)})
    model["tied"] = model["a"]
    found = gradients_lost(saved(tmp_path / "c.pt", model.state_dict(), stepped(model, named=False)))
    told = {name: share for name, share in found.items() if share is not None}
    assert told == {"a.weight": 0.0, "a.bias": 0.0, "b.weight": 0.0, "b.bias": 1.0}


@pytest.mark.parametrize("keys", [("model_state", "optim_state"), ("generator", "opt_g"), ("params", "opt")])
def test_weights_and_states_are_found_under_any_key(keys: tuple[str, str], tmp_path: Path) -> None:
    model = layers(frozen=0)
    optimizer = stepped(model, named=False)
    torch.save(dict(zip(keys, (model.state_dict(), optimizer), strict=True)), tmp_path / "c.pt")
    assert gradients_lost(tmp_path / "c.pt") == {"0.weight": 0, "1.weight": 0, "2.weight": 0, "3.weight": 1}
    torch.save(optimizer, tmp_path / "optimizer.pt")  # the Trainer writes it alone
    assert list(gradients_lost(tmp_path / "optimizer.pt").values()) == [1, 0, 0, 0]


def test_float8_is_read_and_objects_are_named(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    (tensor,) = checkpoint.read(safetensors(tmp_path / "m.safetensors", header, b"\x38\x00\x7f\x38"))
    assert (tensor.dtype, tensor.weights.zeros, tensor.weights.nonfinite) == ("float8_e4m3fn", 1, 1)
    torch.save({"state_dict": {}, "hyper_parameters": argparse.Namespace(lr=1)}, tmp_path / "c.ckpt")
    error = str(called(tmp_path / "c.ckpt").exception)
    assert "it holds argparse.Namespace" in error
    assert "\x1b" not in error


def test_the_state_of_another_optimizer_is_not_taken_for_adams(tmp_path: Path) -> None:
    """Adafactor of transformers keeps `exp_avg_sq` of vectors, without a first moment; its rate may be None."""
    vector = {"step": 5, "RMS": 1.0, "exp_avg_sq": torch.ones(8)}
    state = {"state": {0: vector}, "param_groups": [{"params": [0], "lr": None, "beta1": None}]}
    done = called(saved(tmp_path / "c.pt", {"bias": torch.ones(8)}, state), "--json")
    assert json.loads(done.output)["tensors"][0]["gradient_fp16_zero"] is None


def test_weights_that_are_not_finite_are_critical(tmp_path: Path) -> None:
    done = called(saved(tmp_path / "c.pt", {"a": torch.ones(4), "b": torch.tensor([1.0, math.nan, math.inf])}))
    assert done.exit_code == 1
    assert "2 weights are not finite, in b" in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def test_a_healthy_checkpoint_needs_no_fix(tmp_path: Path) -> None:
    model, state = trained(scale=1e-2)
    done = called(saved(tmp_path / "c.pt", model.state_dict(), state))
    assert (done.exit_code, "nothing to fix" in done.output) == (0, True)


def test_json_has_each_tensor(tmp_path: Path) -> None:
    content = json.loads(called(saved(tmp_path / "c.pt", {"w": torch.tensor([0.0, 1e-9, 1e6])}), "--json").output)
    (row,) = content["tensors"]
    assert (row["fp16_zero"], row["fp16_overflow"], row["elements"]) == (0.5, 0.5, 3)


def safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return path


def test_safetensors_are_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path = safetensors(tmp_path / "m.safetensors", header, array("f", [1.0, math.inf]).tobytes())
    (tensor,) = checkpoint.read(path)
    assert (tensor.name, tensor.weights.nonfinite) == ("w", 1)


class Executes:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def hostile(folder: Path) -> dict[str, Path]:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    files = {
        "runs a command": folder / "run.pt",
        "compressed": folder / "bomb.pt",
        "text": folder / "text.pt",
        "not there": folder / "none.pt",
        "header too long": folder / "long.safetensors",
        "header no JSON": safetensors(folder / "json.safetensors", b"{'w'"),
        "nested without end": safetensors(folder / "deep.safetensors", b"[" * 100_000),
        "offsets outside": safetensors(folder / "out.safetensors", {"w": {**entry, "data_offsets": [0, 10**12]}}),
        "offsets turned": safetensors(
            folder / "turned.safetensors", {"w": {**entry, "data_offsets": [8, 0]}}, b"0" * 8
        ),
        "sizes that do not fit": safetensors(folder / "size.safetensors", {"w": {**entry, "shape": [10**9]}}, b"0" * 8),
        "an unknown type": safetensors(folder / "type.safetensors", {"w": {**entry, "dtype": "X9"}}, b"0" * 8),
        "no tensors": saved(folder / "empty.pt", {}),
    }
    files["runs a command"].write_bytes(pickle.dumps({"model": Executes()}))
    files["text"].write_text("no checkpoint")
    files["header too long"].write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with zipfile.ZipFile(files["compressed"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    return files


@pytest.mark.parametrize(
    "fault",
    ["runs a command", "compressed", "text", "not there", "header too long", "header no JSON", "nested without end",
     "offsets outside", "offsets turned", "sizes that do not fit", "an unknown type", "no tensors"],
)  # fmt: skip
def test_a_hostile_or_broken_file_is_refused_in_one_sentence(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = hostile(tmp_path)[fault]
    error = called(path).exception
    assert isinstance(error, ConfigError)
    assert str(path) in str(error)
    assert not (tmp_path / "executed").exists()


def live(path: Path, *, share: float = 0.0, lost: float = 0.1, **more: float) -> Path:
    """Write the history of a run of 20 steps with layers a and b, and return its path.

    `share`: share of gradient elements under 2^-24. `lost`: share of layer a's elements that a step does not change.
    `more`: `tiny`, the share of layer a's gradient that is subnormal; `largest`, its largest element; `scale`, the
    loss scale, and `skips`, the share of steps that were withheld with it.
    """
    store = Store(path, run="gpt", run_id="gpt-1")
    store.records.begin_attempt(0, b"\x80")
    largest = more.get("largest", 1.0)
    stats = {
        "layer_lost_share": array("f", [lost, 0.0]),
        "layer_grad_tiny_share": array("f", [more.get("tiny", 0.0), 0.0]),
        "layer_grad_min": array("f", [-largest, -0.5]),
        "layer_grad_max": array("f", [0.1, math.nan]),
    }
    for seq in range(20):
        values = {"loss": 1.0, below(-28): share, below(-24): share, below(-48): 0.0}
        if "scale" in more:
            values |= {"loss_scale": more["scale"], "step_skipped": float(seq < 20 * more.get("skips", 0.0))}
        store.records.add_step(0, RunStep(seq, 1e9 + seq, {0: values}, values, LayerStats(("a", "b"), stats, b"\1\1")))
    store.write()
    store.close()
    return path


def read_findings(path: Path) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the output of --json, and the text of all findings."""
    done = called(path, "--json")
    content = json.loads(done.output)
    return done.exit_code, content, " ".join(f"{one['what']} -> {one['do']}." for one in content["findings"])


def test_a_run_is_judged_by_what_its_hooks_sampled(tmp_path: Path) -> None:
    code, _, said = read_findings(live(tmp_path / "gpt.sqlite", share=0.3, lost=0.8))
    assert code == 1
    assert "at least 30.0% of gradient elements become zero in float16" in said
    assert "in 1 of 2 layers half of the elements or more did not change in a step: a" in said


def test_a_run_whose_gradients_were_not_sampled_yet_is_not_called_sound(tmp_path: Path) -> None:
    store = Store(tmp_path / "gpt.sqlite", run="gpt", run_id="gpt-1")
    store.records.begin_attempt(0, b"\x80")
    store.records.add_step(0, RunStep(0, 1e9, {0: {"loss": 1.0}}, {"loss": 1.0}, None))
    store.close()
    with pytest.raises(ConfigError, match="run gpt: its hooks sampled no magnitudes of gradients yet"):
        CliRunner().invoke(cli, ["precision", str(tmp_path / "gpt.sqlite")], catch_exceptions=False)


def test_a_run_whose_gradients_overflow_is_reported_by_layer_and_scale(tmp_path: Path) -> None:
    code, content, said = read_findings(live(tmp_path / "gpt.sqlite", largest=3.0, scale=2.0**16, skips=0.1))
    assert code == 1
    assert content["largest"][0] == ["a", pytest.approx(3.0)]
    assert (content["scale"], content["skipped"]) == (65536.0, pytest.approx(0.1))
    assert "10.0% of the steps were withheld" in said
    assert "with the loss scale 2^16, gradients of a reach 1.97e+05: float16 ends at 65,504" in said
    assert "a loss scale of 2^10 at most, these layers in float32" in said
    assert torch.tensor(3.0).mul(2.0**10).half().isfinite()
    assert torch.tensor(3.0).mul(2.0**16).half().isinf()


def test_layers_that_no_scale_saves_belong_in_float32(tmp_path: Path) -> None:
    """A loss scale that would save a layer's small gradients would make its large ones overflow."""
    _, content, said = read_findings(live(tmp_path / "gpt.sqlite", share=0.3, tiny=0.9, largest=1000.0, scale=1.0))
    assert content["tiny"][0] == ["a", pytest.approx(0.9)]
    assert "GradScaler(init_scale=2.0**0); keep in float32: a; or bfloat16." in said


def test_a_healthy_run_needs_no_fix(tmp_path: Path) -> None:
    done = called(live(tmp_path / "gpt.sqlite", scale=2.0**12))
    assert done.exit_code == 0
    assert "nothing to fix" in done.output


def test_an_unknown_run_is_reported_in_one_sentence() -> None:
    assert "no history of nothing" in str(called("nothing").exception)
