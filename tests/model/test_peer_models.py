"""The model as other servers want it."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from benchmarks.peers.models import make_bfloat16
from configs.model_spec import ModelSpec
from tests.support.tiny_models import save_tiny_model
from workers.attention.reference import ReferenceBackend
from workers.models import build_model
from workers.parallel import SingleProcessGroup
from workers.weights import load_weights


def test_the_bfloat16_copy_is_the_same_model_with_every_weight_rounded(tmp_path):
    model, copy = save_tiny_model("smollm2", tmp_path / "model"), tmp_path / "copy"
    for _ in range(2):  # what exists is kept
        make_bfloat16(model, copy)
    assert sorted(file.name for file in copy.iterdir()) == sorted(file.name for file in model.iterdir())
    assert ModelSpec.from_directory(copy).dtype == "bfloat16"
    exact, rounded = (load_file(folder / "model.safetensors") for folder in (model, copy))
    assert rounded.keys() == exact.keys()
    for name, weight in rounded.items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight.float(), exact[name].float(), rtol=2**-8, atol=0.0)


def test_in_float32_the_copy_has_weights_that_bfloat16_holds_exactly(tmp_path):
    make_bfloat16(save_tiny_model("smollm2", tmp_path / "model"), tmp_path / "copy")
    spec = ModelSpec.from_directory(tmp_path / "copy")
    model = build_model(spec, SingleProcessGroup(), ReferenceBackend(), torch.float32, "cpu")
    load_weights(model, spec)
    for weight in model.parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weight.to(torch.bfloat16).float())
