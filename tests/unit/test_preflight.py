from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.deployment_errors import AddressError, PlacementError, StartupError, UsageError
from cluster.identity import Identity, check_same, model_fingerprint, source_hash, source_root
from cluster.placement import NodeResources, plan_groups
from cluster.preflight import check_memory, check_port_free, check_table, compute_budget, listen
from cluster.ray_environment import PRIVATE_CLUSTER, check_reachable, choose_address, ray_environment
from configs.matrices import weight_bytes
from configs.model_spec import ModelSpec
from configs.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, WorkerConfig

GIB = 2**30


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """SmolLM2-135M's shape: 9 query heads, 3 KV heads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelSpec.from_directory(tmp_path)


def make_config(**options: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path="smollm2"), **options)


def make_node(memory_bytes: int = 16 * GIB) -> NodeResources:
    return NodeResources(node_id="a", address="10.0.0.1", num_cpus=8, free_cpus=8, memory_bytes=memory_bytes)


def over_ranks(num_ranks: int) -> EngineConfig:
    return make_config(parallel=ParallelConfig(tensor_parallel_size=num_ranks))


def test_the_bytes_of_a_rank_follow_its_heads(spec):
    budget = compute_budget(over_ranks(2), spec, "cpu")
    first, second = budget.ranks
    assert (first.shard.num_heads, second.shard.num_heads) == (6, 3)
    assert (first.shard.num_kv_heads, second.shard.num_kv_heads) == (2, 1)
    assert first.kv_bytes_per_token == 2 * second.kv_bytes_per_token
    assert first.weight_bytes > second.weight_bytes
    assert first.weight_bytes + second.weight_bytes == pytest.approx(weight_bytes(spec, "float32"), rel=0.01)


def test_the_dtype_is_float32_on_cpu_and_the_checkpoints_on_gpu(spec):
    assert compute_budget(make_config(), spec, "cpu").dtype == "float32"
    assert compute_budget(make_config(), spec, "cuda").dtype == "bfloat16"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_on_a_cpu_are_accompanied_by_sixteen_bits(spec, quantization):
    few_bits = ModelConfig(path="smollm2", quantization=quantization)
    assert compute_budget(EngineConfig(model=few_bits), spec, "cpu").dtype == "bfloat16"
    exact = replace(few_bits, dtype="float32")
    assert compute_budget(EngineConfig(model=exact), spec, "cpu").dtype == "float32"


def test_the_caches_dtype_is_the_models_unless_it_is_given(spec):
    assert compute_budget(make_config(), spec, "cpu").cache_dtype == "float32"
    assert compute_budget(make_config(), spec, "cuda").cache_dtype == "bfloat16"
    in_int8 = compute_budget(make_config(cache=CacheConfig(dtype="int8")), spec, "cpu")
    assert (in_int8.dtype, in_int8.cache_dtype) == ("float32", "int8")


def test_a_smaller_dtype_of_the_cache_holds_more_tokens(spec):
    """64 numbers of 4, 2 or 1 byte per head; in int8 a scale of 4 bytes more."""
    tokens = {}
    for dtype in ("float32", "bfloat16", "int8"):
        budget = compute_budget(make_config(cache=CacheConfig(dtype=dtype)), spec, "cpu")
        tokens[dtype] = budget.num_cache_tokens
    assert tokens == {
        "float32": GIB // (30 * 2 * 3 * 256),
        "bfloat16": GIB // (30 * 2 * 3 * 128),
        "int8": GIB // (30 * 2 * 3 * 68),
    }


@pytest.mark.parametrize(
    ("cache_dtype", "device", "message"),
    [
        ("float16", "cpu", r"not served by the C\+\+ kernels; give bfloat16, .* or worker\.cpu_kernels pytorch"),
        ("fp8", "cpu", r"not served by the C\+\+ kernels; give int8, .* or worker\.cpu_kernels pytorch"),
        ("int8", "cuda", "int8 is not served on a GPU; give fp8"),
        ("float32", "cuda", "the model computes in bfloat16, .*; leave cache.dtype out, or set model.dtype to float32"),
    ],
)
def test_a_cache_that_the_device_cannot_hold_is_refused_with_what_to_do(spec, cache_dtype, device, message):
    with pytest.raises(UsageError, match=message):
        compute_budget(make_config(cache=CacheConfig(dtype=cache_dtype)), spec, device)


@pytest.mark.parametrize("dtype", ["float16", "fp8"])
def test_what_the_kernels_do_not_serve_is_held_where_pytorch_computes(spec, dtype):
    cache = CacheConfig(dtype=dtype)
    config = make_config(cache=cache, worker=WorkerConfig(cpu_kernels="pytorch"))
    assert compute_budget(config, spec, "cpu").cache_dtype == dtype


def test_a_cache_in_fp8_is_held_on_a_gpu_at_one_byte_a_number(spec):
    halved, whole = (compute_budget(make_config(cache=CacheConfig(dtype=d)), spec, "cuda") for d in ("fp8", "auto"))
    assert halved.cache_dtype == "fp8"
    assert 2 * halved.ranks[0].kv_bytes_per_token == whole.ranks[0].kv_bytes_per_token
    half = EngineConfig(model=ModelConfig(path="smollm2", dtype="float16"))
    assert compute_budget(half, spec, "cpu").cache_dtype == "float16"


def test_the_cache_holds_what_its_most_loaded_rank_can_hold(spec):
    budget = compute_budget(replace(over_ranks(2), cache=CacheConfig(memory_gib=1.0)), spec, "cpu")
    assert budget.num_cache_tokens == GIB // budget.ranks[0].kv_bytes_per_token


def test_a_longer_sequence_than_the_models_is_refused(spec):
    config = EngineConfig(model=ModelConfig(path="smollm2", max_model_len=10_000))
    with pytest.raises(UsageError, match="the model's own limit is 8192"):
        compute_budget(config, spec, "cpu")


def test_weights_and_cache_that_do_not_fit_into_memory_are_refused_with_both_numbers(spec):
    config = make_config(cache=CacheConfig(memory_gib=20.0))
    plans = plan_groups([make_node()], num_replicas=1, ranks_per_replica=1, device="cpu")
    with pytest.raises(
        PlacementError, match=r"node 10.0.0.1 need 20.* GiB .* it has\s+16.00 GiB; lower cache.memory_gib"
    ):
        check_memory(compute_budget(config, spec, "cpu"), plans, [make_node()])


def test_the_table_says_what_an_uneven_split_costs(spec):
    config, nodes = over_ranks(2), [make_node()]
    plans = plan_groups(nodes, num_replicas=1, ranks_per_replica=2, device="cpu")
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(check_table(config, spec, compute_budget(config, spec, "cpu"), plans, nodes))
    text = console.export_text()
    console.file.close()
    assert "9 = 6+3 over the ranks, unevenly" in text
    assert "1.33x the mean" in text
    assert "8 of 8 free" in text
    assert "tokens in float32" in text


def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with listen("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(AddressError, match=rf"port {port} on 127.0.0.1 is in use; .*ingress.port"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(AddressError, match=r"set ingress\.host"):
        check_port_free("192.0.2.77", 0)


def make_identity(rank: int = 0, **changes: Any) -> Identity:
    versions = {"source": "abc", "torch": "2.13"} | changes.pop("versions", {})
    return Identity(rank=rank, address=f"10.0.0.{rank}", pid=1, versions=versions, **changes)


def test_equal_ranks_pass():
    check_same({"source": "abc"}, [make_identity(0), make_identity(1)])


def test_a_rank_with_other_source_is_refused_by_name():
    identities = [make_identity(0), make_identity(1, versions={"source": "xyz"})]
    with pytest.raises(StartupError, match=r"rank 1 on node 10.0.0.1 has source xyz, the driver has abc"):
        check_same({"source": "abc"}, identities)


def test_a_rank_with_another_torch_is_refused_by_name():
    identities = [make_identity(0), make_identity(1, versions={"torch": "2.12"})]
    with pytest.raises(StartupError, match=r"rank 1 .* has torch 2.12, rank 0 .* has 2.13; install the same torch"):
        check_same({"source": "abc"}, identities)


def test_two_ranks_on_one_device_are_refused():
    with pytest.raises(StartupError, match="the same device GPU-7"):
        check_same({}, [make_identity(0, device_uuid="GPU-7"), make_identity(1, device_uuid="GPU-7")])


def test_the_source_hash_sees_every_change_of_code_and_nothing_else(tmp_path):
    for package in ("configs", "scheduler", "workers", "cluster"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    before = source_hash(tmp_path)
    (tmp_path / "workers" / "notes.txt").write_text("not code")
    (tmp_path / "workers" / "__pycache__").mkdir()
    assert source_hash(tmp_path) == before
    (tmp_path / "workers" / "kernel.cpp").write_text("int x;")
    assert source_hash(tmp_path) != before


def test_the_four_packages_come_from_this_checkout():
    assert source_root() == Path(__file__).resolve().parents[2]


def test_a_models_fingerprint_follows_its_weight_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = model_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert model_fingerprint(tmp_path) != before


def test_auto_joins_the_cluster_of_the_environment_and_else_none():
    assert choose_address("auto", {}) == "local"
    assert choose_address("auto", {"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    assert choose_address("local", {"RAY_ADDRESS": "10.0.0.1:6379"}) == "local"


def test_a_dashboard_address_and_ray_client_are_refused_with_what_to_do():
    with pytest.raises(UsageError, match="ray job submit --address http://head:8265"):
        choose_address("auto", {"RAY_ADDRESS": "http://head:8265"})
    with pytest.raises(UsageError, match="not supported"):
        choose_address("ray://head:10001", {})
    with pytest.raises(UsageError, match="host:port"):
        choose_address("nonsense", {})


def test_a_private_cluster_gets_a_token_of_its_own(tmp_path):
    first, second = (ray_environment("local", {}, tmp_path) for _ in range(2))
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert first["RAY_worker_niceness"] == "0"


def test_a_private_cluster_starts_no_idle_workers_and_one_that_is_joined_is_left_as_it_is(tmp_path):
    assert ray_environment("local", {}, tmp_path)["RAY_prestart_worker_first_driver"] == "0"
    assert not PRIVATE_CLUSTER.keys() & ray_environment("10.0.0.1:6379", {}, tmp_path).keys()
    asked = {"RAY_prestart_worker_first_driver": "1"}
    assert not asked.keys() & ray_environment("local", asked, tmp_path).keys()


def test_what_the_user_has_set_stays(tmp_path):
    chosen = ray_environment("local", {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "5"}, tmp_path)
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_worker_niceness"} & set(chosen)


def test_a_cluster_that_is_joined_is_spoken_to_with_a_token_if_there_is_one(tmp_path):
    assert ray_environment("10.0.0.1:6379", {}, tmp_path)["RAY_AUTH_MODE"] == "disabled"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert ray_environment("10.0.0.1:6379", {}, tmp_path)["RAY_AUTH_MODE"] == "token"


def test_a_head_that_does_not_answer_is_refused_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(AddressError, match="no Ray head answers"):
            check_reachable(f"127.0.0.1:{unused.getsockname()[1]}")
