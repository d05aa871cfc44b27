"""Writes the reference page of every option from the schema itself.

    python -m configs.reference > docs/configuration.md

A test keeps the page in the repository equal to what this prints.
"""

from __future__ import annotations

import typing
from dataclasses import fields

from configs.build import Option, schema_options
from configs.schema import EngineConfig

_INTRODUCTION = """\
# Configuration

One YAML file describes one deployment. `python deploy.py serve FILE` takes a path or the name of a preset in
`configs/presets/`; `--set section.option=value`, as often as wanted, changes single options on top of it. Only
`model.path` must be given. An unknown option, a wrong type, a value out of range or a key given twice is an error
that names the file's line; nothing is silently ignored.

```yaml
model:
  path: Qwen/Qwen3-0.6B
parallel:
  tensor_parallel_size: 2
```

**Paths.** `model.path` is a local file or directory where it ends in `.gguf` or begins with `.`, `/` or `~`. A relative
one starts from the folder of the YAML file, and in `--set` from the working directory. Anything else is a directory
below the working directory if there is one of that name, or else the id of a model on the Hugging Face hub.

**Together.** `scheduler.max_num_seqs` and `scheduler.max_prefill_chunk` may be at most
`scheduler.max_num_batched_tokens`.

This page is written by `python -m configs.reference`; do not edit it by hand.
"""


def reference_page() -> str:
    """The page as Markdown: one section of the file per heading, one option per row."""
    parts = [_INTRODUCTION]
    hints = typing.get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        schema = hints[field.name]
        rows = [_row(option) for option in schema_options(schema, f"{field.name}.")]
        heading = f"\n## `{field.name}`\n\n{schema.__doc__}\n\n"
        parts.append(heading + "| option | legal values | default | what it is |\n|---|---|---|---|\n" + "".join(rows))
    return "".join(parts)


def _row(option: Option) -> str:
    return f"| `{option.path}` | {option.legal_values()} | {_default(option)} | {option.doc} |\n"


def _default(option: Option) -> str:
    if option.is_required:
        return "must be given"
    factory = option.field.default_factory
    value = factory() if callable(factory) else option.field.default
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return f"`{text}`"


if __name__ == "__main__":
    print(reference_page(), end="")
