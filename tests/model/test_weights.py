"""Loading: each rank reads its slices only, from any number of files; random weights do not depend on the split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.matrices import num_rank_parameters
from configs.model_spec import ModelSpec
from tests.support.dense_attention import DenseAttention
from tests.support.thread_group import ThreadGroup, run_ranks
from tests.support.tiny_models import TINY_MODELS, save_tiny_model
from workers.layers.parameter import Piece, ShardedParameter
from workers.models import CausalLM, build_model
from workers.parallel import ParallelGroup, SingleProcessGroup
from workers.weights import RandomSource, SafetensorsSource, fill, load_weights


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model("llama-biases", tmp_path / "model")


def build(directory: Path, group: ParallelGroup, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(ModelSpec.from_directory(directory), group, DenseAttention(), dtype, "cpu")


def load(directory: Path, **options: object) -> CausalLM:
    model = build(directory, SingleProcessGroup())
    load_weights(model, ModelSpec.from_directory(directory), **options)
    return model


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def assembled(models: list[CausalLM]) -> dict[str, Tensor]:
    """The checkpoint's tensors, put together again from the parts that the ranks hold."""
    whole: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, ShardedParameter)
            for piece in parameter.pieces:
                part = parameter.data[piece.target.start : piece.target.stop]
                full = whole.setdefault(piece.tensor_name(name), torch.full(piece.full_shape, math.nan))
                rows = full[piece.rows.start : piece.rows.stop]
                if piece.columns is None:
                    rows.copy_(part)
                else:
                    rows[:, piece.columns.start : piece.columns.stop] = part
    return whole


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 9])
def test_the_ranks_parts_make_up_the_checkpoint(num_ranks: int, directory: Path) -> None:
    def load_part(group: ThreadGroup) -> CausalLM:
        model = build(directory, group)
        load_weights(model, ModelSpec.from_directory(directory))
        return model

    whole = assembled(run_ranks(num_ranks, load_part))
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(whole[name], tensor), name


def test_each_rank_reads_no_more_than_it_holds(directory: Path) -> None:
    class Counting(SafetensorsSource):
        num_read = 0

        def read(self, name: str, piece: Piece) -> Tensor:
            value = super().read(name, piece)
            self.num_read += value.numel()
            return value

    def num_read(group: ThreadGroup) -> tuple[int, int]:
        model = build(directory, group)
        with Counting(directory) as source:
            fill(model, source)
            return source.num_read, sum(p.numel() for p in model.parameters())

    counts = run_ranks(3, num_read)
    assert all(read == held for read, held in counts)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("num_ranks", [1, 3, 5])
def test_the_spec_counts_the_parameters_of_every_rank(name: str, num_ranks: int, tmp_path: Path) -> None:
    TINY_MODELS[name]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = {"gemma3_text": "Gemma3"}.get(config["model_type"], config["model_type"].capitalize())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [f"{architecture}ForCausalLM"]}))
    spec = ModelSpec.from_directory(tmp_path)
    held = run_ranks(num_ranks, lambda group: sum(p.numel() for p in build(tmp_path, group).parameters()))
    assert held == [num_rank_parameters(spec, rank, num_ranks) for rank in range(num_ranks)]


def test_a_checkpoint_in_several_files_is_read_by_its_index(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    names = sorted(expected)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: expected[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    assert torch.equal(load(directory).model.norm.weight, expected["model.norm.weight"])
    (directory / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2\.safetensors is missing"):
        load(directory)


def test_weights_become_the_wanted_type(directory: Path) -> None:
    model = build(directory, SingleProcessGroup(), torch.bfloat16)
    load_weights(model, ModelSpec.from_directory(directory))
    expected = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, expected.to(torch.bfloat16))


def test_missing_tensors_are_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"holds no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


def test_leftover_tensors_are_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"1 tensors that this model does not use: model\.layers\.0\.adapter\.weight"):
        load(directory)


def test_a_tied_head_and_old_rope_buffers_in_the_file_are_harmless(directory: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(2, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    rewrite(directory, lambda tensors: tensors.update(extra))
    load(directory)


def test_shapes_that_differ_from_the_configuration_are_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\], its config\.json calls for \[64\]"):
        load(directory)


@pytest.mark.parametrize("length", [0, 5, -1000])
def test_a_file_that_is_cut_short_is_named(directory: Path, length: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short .*; fetch it again"):
        SafetensorsSource(directory)


def test_a_directory_without_safetensors_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        load(directory)


def test_random_weights_need_no_files_and_do_not_depend_on_the_number_of_ranks(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    spec = ModelSpec.from_directory(directory)

    def draw(group: ParallelGroup) -> CausalLM:
        model = build(directory, group)
        load_weights(model, spec, load_format="random", seed=3)
        return model

    alone = assembled([draw(SingleProcessGroup())])
    for num_ranks in (2, 5):
        split = assembled(run_ranks(num_ranks, draw))
        assert alone.keys() == split.keys()
        assert all(torch.equal(alone[name], split[name]) for name in alone)
    other = assembled([load(directory, load_format="random", seed=4)])
    assert not torch.equal(alone["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_random_weights_look_random() -> None:
    shape = (1000, 700)
    piece = Piece(target=range(shape[0]), rows=range(shape[0]), columns=range(shape[1]), full_shape=shape)
    drawn = RandomSource(0).read("a.weight", piece)
    assert drawn.mean().abs() < 1e-4 and drawn.std() == pytest.approx(0.02, rel=0.01)
    assert len(drawn.unique()) > 0.95 * drawn.numel()
    neighbours = torch.stack([drawn.flatten()[:-1], drawn.flatten()[1:]])
    columns = torch.stack([drawn[:-1].flatten(), drawn[1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.01 and torch.corrcoef(columns)[0, 1].abs() < 0.01
    assert torch.linalg.matrix_rank(drawn) == 700
