"""What computes is chosen once, said in the log, and falls back to PyTorch where the kernels cannot be had."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.peers import refuse_amx
from configs import EngineConfig, ModelConfig, WorkerConfig
from configs.model_spec import ModelSpec
from tests.support.cpu_kernels import variants_here
from tests.support.tiny_models import save_tiny_model
from workers.attention.reference import ReferenceBackend
from workers.compute import choose_compute, choose_sampler
from workers.cpu_decoder import CpuDecoder
from workers.cpu_sampler import CpuSampler
from workers.kernels.cpu import build as kernel_build
from workers.kernels.cpu.build import KernelsUnavailable, Variant, build, choose_variant
from workers.kernels.cpu.library import CpuKernels
from workers.models import CausalLM, build_model
from workers.parallel import SingleProcessGroup
from workers.sampler import choose_with_torch
from workers.weights import load_weights

ONE_FUNCTION = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_model("smollm2", tmp_path_factory.mktemp("smollm2"))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Nothing in the cache, and nothing to fill it with."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))


def choose(directory, *, dtype=torch.float32, quantization="none", cpu_kernels="auto"):
    spec, group = ModelSpec.from_directory(directory), SingleProcessGroup()
    model = build_model(spec, group, ReferenceBackend(), dtype, "cpu")
    load_weights(model, spec)
    config = EngineConfig(
        model=ModelConfig(path=str(directory), quantization=quantization),
        worker=WorkerConfig(cpu_kernels=cpu_kernels),
    )
    return choose_compute(model, config, spec, group, dtype, num_threads=1)


def test_kernels_are_used_exactly_where_they_can_be_built(directory, caplog):
    caplog.set_level(logging.INFO)
    chosen = choose(directory)
    assert isinstance(chosen, CpuDecoder if variants_here() else CausalLM)
    assert ("compute: C++ kernels" in caplog.text) == bool(variants_here())


@pytest.mark.skipif(not variants_here(), reason="no compiler for the kernels")
def test_the_log_says_in_which_formats_the_weights_are_kept(directory, caplog):
    caplog.set_level(logging.INFO)
    choose(directory, dtype=torch.bfloat16, quantization="int4")
    assert re.search(r"weights of .* MB int4, .* MB int8, .* MB bfloat16", caplog.text)


def test_the_kernels_that_compute_a_step_also_choose_its_tokens(directory):
    cpu = torch.device("cpu")
    sampler = choose_sampler(choose(directory), cpu)
    assert isinstance(sampler, CpuSampler) if variants_here() else sampler is choose_with_torch
    assert choose_sampler(choose(directory, cpu_kernels="pytorch"), cpu) is choose_with_torch


def test_without_a_compiler_pytorch_computes_and_the_log_says_why(directory, no_compiler, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(choose(directory), CausalLM)
    assert "compute: PyTorch" in caplog.text
    assert "no C++ compiler (no-such-compiler); install g++" in caplog.text


def test_clang_is_not_taken_for_a_compiler_of_the_kernels(monkeypatch, tmp_path):
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\n")
    clang.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match=r"install g\+\+ 11 or newer"):
        kernel_build.find_compiler()


def test_pytorch_computes_where_it_is_asked_for(directory, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(choose(directory, cpu_kernels="pytorch"), CausalLM)
    assert "worker.cpu_kernels is pytorch" in caplog.text


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="AMX is of x86-64")
def test_without_the_systems_leave_to_use_amx_the_next_best_is_chosen():
    code = (
        "import logging; logging.basicConfig(level='INFO'); from workers.kernels.cpu import build; "
        "print([v.name for v in build.supported_variants()]); build.choose_variant('amx')"
    )
    command = [sys.executable, "-I", refuse_amx.__file__, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    without = [variant.name for variant in kernel_build.supported_variants() if variant.name != "amx"]
    assert done.stdout.strip() == str(without)
    assert "no CPU kernels called 'amx'" in done.stderr
    has_amx = "amx_tile" in kernel_build.cpu_features()
    assert ("without AMX, which the system refuses: Operation not permitted" in done.stderr) == has_amx


def test_a_precision_that_the_kernels_lack_is_left_to_pytorch(directory):
    assert isinstance(choose(directory, dtype=torch.float16), CausalLM)


def test_what_is_insisted_on_and_cannot_be_had_is_an_error(directory, no_compiler):
    for quantization in ("int8", "int4"):
        with pytest.raises(ValueError, match=f"{quantization} needs the C\\+\\+ kernels: no C\\+\\+ compiler"):
            choose(directory, quantization=quantization)
    with pytest.raises(ValueError, match="cpu_kernels is 'portable': no C\\+\\+ compiler"):
        choose(directory, cpu_kernels="portable")
    with pytest.raises(ValueError, match="no CPU kernels called 'fastest'"):
        choose(directory, cpu_kernels="fastest")


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'internal error: out of ideas' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelsUnavailable, match="out of ideas"):
        build(choose_variant(), tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path):
    if not variants_here():
        return
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KernelsUnavailable, match="cannot build the CPU kernels in"):
        build(choose_variant(), tmp_path / "file" / "cache")


def test_a_library_of_something_else_is_refused(tmp_path):
    (tmp_path / "library.so").write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailable, match="cannot load"):
        CpuKernels(tmp_path / "library.so", "portable")


class OneSource:
    """The build of a small library, and how often the compiler was started for it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources, self.cache = folder / "sources", folder / "cache"
        self.sources.mkdir()
        (self.sources / "one.cpp").write_text(ONE_FUNCTION)
        self.num_compilations = 0
        monkeypatch.setattr(kernel_build, "SOURCES", self.sources)
        compile_all = kernel_build._compile

        def counted(*arguments) -> None:
            self.num_compilations += 1
            compile_all(*arguments)

        monkeypatch.setattr(kernel_build, "_compile", counted)

    def build(self, *flags: str) -> Path:
        return build(Variant("plain", (), flags, frozenset()), self.cache)


@pytest.fixture
def one_source(tmp_path, monkeypatch):
    return OneSource(tmp_path, monkeypatch)


def test_a_library_is_built_again_only_when_something_changed(one_source):
    if not variants_here():
        return
    first = one_source.build()
    assert first == one_source.build()
    assert one_source.num_compilations == 1
    assert one_source.build("-DANYTHING") != first
    (one_source.sources / "one.cpp").write_text(ONE_FUNCTION.replace("42", "43"))
    assert one_source.build() != first
    assert one_source.num_compilations == 3


def test_who_asks_at_the_same_time_gets_one_build(one_source):
    if not variants_here():
        return
    found = []
    threads = [threading.Thread(target=lambda: found.append(one_source.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert one_source.num_compilations == 1
    assert sorted(path.name for path in one_source.cache.iterdir()) == sorted([".lock", found[0].name])
