"""The configuration schema: one YAML file maps to one `EngineConfig`.

Owns the options, their defaults and their legal ranges. Knows nothing of files (`configs.loader`), of
models (`configs.model_spec`) or of clusters. Every object is frozen: nothing configured changes while running.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]
Device = Literal["auto", "cpu", "cuda"]

GIB = 1 << 30
DEFAULT_CPU_CACHE_GIB = 1.0


def bounded(default: Any, *, ge: float | None = None, le: float | None = None, doc: str) -> Any:
    """A dataclass field with a legal range, checked by the loader, and a description for the reference page."""
    return field(default=default, metadata={"ge": ge, "le": le, "doc": doc})


def described(default: Any, doc: str) -> Any:
    """A dataclass field whose type alone says what is legal."""
    return bounded(default, doc=doc)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which precision."""

    path: str = field(metadata={"doc": "hub id, Hugging Face directory, or .gguf file"})
    served_name: str | None = described(None, "name clients use; default: the last part of `path`")
    dtype: Dtype = described(
        "auto", "weights and activations; auto: the checkpoint's on GPU; on CPU float32, or bfloat16 with int8 or int4"
    )
    quantization: Literal["none", "int8", "int4"] = described("none", "CPU only; weights in 8 or 4 bits")
    max_model_len: int | None = bounded(None, ge=1, doc="tokens per sequence; default: the model's own limit")
    load_format: Literal["auto", "random"] = described("auto", "random: weights drawn from `seed`, for benchmarks")
    seed: int = bounded(0, ge=0, le=2**63 - 1, doc="seed of random weights and of requests that bring none")
    cache_dir: str | None = described(None, "converted models; default: $ANTIPHON_CACHE or ~/.cache/antiphon")

    def dtype_on(self, device: str, checkpoint_dtype: str) -> str:
        """What `dtype` means on a "cpu" or "cuda" for weights that are stored in `checkpoint_dtype`."""
        if self.dtype != "auto":
            return self.dtype
        if device != "cpu":
            return checkpoint_dtype
        # Beside weights in 8 bits or 4 nothing is lost by keeping embedding and KV cache in 16.
        return "float32" if self.quantization == "none" else "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many copies of the model, and over how many ranks each is split."""

    tensor_parallel_size: int = bounded(1, ge=1, le=1024, doc="ranks per replica; any number")
    num_replicas: int = bounded(1, ge=1, le=1024, doc="copies of the model behind one ingress")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    dtype: CacheDtype = described("auto", "keys and values; auto: as `model.dtype`; int8: CPU only; fp8: GPU")
    block_size: int = bounded(256, ge=1, le=4096, doc="tokens per block; flash-attn needs a multiple of 256")
    num_blocks: int | None = bounded(None, ge=1, doc="blocks per rank; default: what fits in memory")
    memory_gib: float | None = bounded(None, ge=0.001, doc="KV memory per rank on CPU; default: 1 GiB")
    gpu_memory_utilization: float = bounded(0.9, ge=0.05, le=1.0, doc="share of GPU memory this rank may fill")
    enable_prefix_caching: bool = described(True, "reuse the KV of equal prompt prefixes")
    watermark: float = bounded(0.01, ge=0.0, le=0.5, doc="share of blocks kept free at admission, for growth")

    @property
    def cpu_bytes(self) -> int:
        """KV memory of a rank on CPU where `num_blocks` does not decide."""
        return int((self.memory_gib or DEFAULT_CPU_CACHE_GIB) * GIB)

    def dtype_for(self, model_dtype: str) -> str:
        """What `dtype` means beside a model that computes in `model_dtype`."""
        return model_dtype if self.dtype == "auto" else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold and who goes first."""

    max_num_seqs: int = bounded(64, ge=1, le=65536, doc="running sequences, also the worker's slots")
    max_num_batched_tokens: int = bounded(2048, ge=1, doc="tokens computed in one step, all sequences together")
    max_prefill_chunk: int = bounded(512, ge=1, doc="prompt tokens of one sequence computed in one step")
    one_step_ahead: bool = described(True, "schedule step n+1 before the tokens of step n are known")
    policy: Literal["fcfs", "priority", "fair"] = described(
        "priority", "order of waiting requests: arrival; priority, then arrival; priority, then tenant shares"
    )
    max_num_waiting: int = bounded(4096, ge=1, doc="requests that may wait; more are refused with 429")
    max_preemptions: int = bounded(4, ge=0, doc="times one request may be preempted while others can be")
    stall_timeout_s: float = bounded(30.0, ge=0.1, doc="work without progress this long is explained in the log")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How one rank computes."""

    device: Device = described("auto", "auto: cuda where the cluster has GPUs, else cpu")
    num_threads: int | None = bounded(None, ge=1, le=1024, doc="CPU threads per rank; default: its share of the node")
    attention_backend: str = described(
        "auto", "auto, fa3, fa4, flash_attn, triton, reference, or two for prefill and decode: fa4+triton"
    )
    cuda_graphs: bool = described(True, "on a GPU, replay decode steps from captured graphs")
    cpu_kernels: str = described("auto", "on CPU: auto, pytorch, or C++ for amx, avx512, avx2, neon or portable")
    env: dict[str, str] = field(
        default_factory=dict, metadata={"doc": "environment of every rank; a node's own value wins"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressConfig:
    """The HTTP door."""

    host: str = described("127.0.0.1", "address to listen on")
    port: int = bounded(8000, ge=0, le=65535, doc="0: any free port, printed at start")
    api_key: str | None = field(
        default=None, repr=False, metadata={"ge": None, "le": None, "doc": "clients must send it as a bearer token"}
    )
    max_body_mib: float = bounded(16.0, ge=0.001, doc="largest request body")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where to run, and how long each wait may last."""

    address: str = described("auto", "auto: $RAY_ADDRESS, else a cluster of this machine; local; or host:port")
    engine_id: str | None = described(None, "names this deployment's actors; default: random")
    placement_timeout_s: float = bounded(30.0, ge=0.1, doc="for the cluster to grant the devices")
    startup_timeout_s: float = bounded(600.0, ge=1, doc="for one phase of a worker's start (fetch, load, profile)")
    step_timeout_s: float = bounded(60.0, ge=0.1, doc="for the ranks to answer one step")
    heartbeat_s: float = bounded(
        1.0, ge=0.05, doc="silence after which a rank is asked for a sign of life; ten times that: it hangs"
    )
    drain_timeout_s: float = bounded(30.0, ge=0.0, doc="after SIGTERM, for running requests to finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One deployment: everything a YAML file may say."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
