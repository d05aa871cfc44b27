"""From what a user calls a model to a local Hugging Face directory: a hub id, a directory, or a .gguf file.

A GGUF file is converted once into the cache; later calls find it there. Runs as a subprocess of the launcher
(`python -m workers.prepare REF`, which prints the directory), so that the launcher never loads numpy or torch.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from workers.cache_dir import default_cache_dir, exclusive

CONVERTER_VERSION = 1
"""Part of a conversion's name in the cache: raise it when the output of the conversion changes."""

LOCK_TIMEOUT_S = 1800.0
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
OTHER_FORMATS = ["*/*", "consolidated*"]  # copies of the weights that some repositories hold besides


def prepare_model(ref: str, cache_dir: Path | str | None = None) -> Path:
    """The directory with config.json, safetensors and tokenizer that `ref` stands for.

    ValueError: nothing of that name, or a model that cannot be converted; the message says what to do.
    """
    path = Path(ref).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} has no config.json: give a Hugging Face model directory, a hub id or a .gguf file"
            )
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is not a .gguf file: give a Hugging Face model directory, a hub id or a .gguf file"
            )
        return _converted(path.resolve(), default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser())
    if path.suffix == ".gguf" or path.is_absolute() or ref.startswith((".", "~")) or ref.count("/") > 1:
        raise ValueError(f"{ref} does not exist: give a Hugging Face model directory, a hub id or a .gguf file")
    return _downloaded(ref)


def _converted(source: Path, cache_dir: Path) -> Path:
    """Convert under a lock and move into place at once: a directory in the cache is always whole."""
    target = cache_dir / "models" / _cache_name(source)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target.with_suffix(".lock"), LOCK_TIMEOUT_S):
        if target.is_dir():  # another process was faster
            return target
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        unfinished.mkdir()
        from workers.gguf import convert_gguf  # only now: whatever is in the cache is found without numpy

        try:
            convert_gguf(source, unfinished)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return target


def _cache_name(source: Path) -> str:
    """Changes with the file's place, size and time, and with the converter."""
    stat = source.stat()
    identity = f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERTER_VERSION}"
    return f"{source.stem.replace('.', '-')}-{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"


def _downloaded(ref: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(ref, allow_patterns=HUB_FILES, ignore_patterns=OTHER_FORMATS))
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise ValueError(
            f"{ref} is neither a file or directory here nor a model on the hub: {str(error).splitlines()[0]}"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{ref} is no file or directory here, and the hub could not be asked for it; give a local path, or make "
            f"the hub reachable ({str(error).splitlines()[0]})"
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("ref", help="hub id, Hugging Face directory, or .gguf file")
    parser.add_argument("--cache-dir", default=None, help="default: $ANTIPHON_CACHE or ~/.cache/antiphon")
    arguments = parser.parse_args()
    try:
        print(prepare_model(arguments.ref, arguments.cache_dir))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        print(f"{error}; set model.cache_dir to a folder that can be written and has room", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
