"""Times other tiles than those in `workers/kernels/triton/tuning.py`, to correct that table from.

    python -m benchmarks.gpu_tune [--only decode prefill]

The table's own choice is the first row of each group; the fastest is marked. Needs what `benchmarks.gpu_check` needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch

from benchmarks.gpu_scene import DEVICE, make_scene, seconds_of
from benchmarks.report import heading, markdown_table
from workers.attention.triton_paged import TritonPagedBackend
from workers.kernels.triton import decode, prefill, splits
from workers.kernels.triton.tuning import Tile, decode_tile, device_of, prefill_tile

Row = tuple[object, ...]
HEADS, HEAD_DIM = (32, 8), 128

DECODE_TILES = [Tile(16, keys, warps, stages) for keys in (16, 32, 64) for warps in (4, 8) for stages in (3, 5)]
PREFILL_TILES = [
    Tile(rows, keys, warps, stages)
    for rows, warps in ((64, 4), (128, 4), (128, 8))
    for keys in (32, 64, 128)
    for stages in (2, 3, 4)
]


def tune_decode() -> Iterator[Row]:
    """Tiles first, then how much is cut and how many programs there are, with the table's tile."""
    capability = device_of(DEVICE).capability
    own = decode_tile(capability, group=HEADS[0] // HEADS[1], head_dim=HEAD_DIM, item_bytes=2)
    for num_seqs, length in ((1, 131072), (64, 4096), (256, 1024)):
        for block_size in (16, 64):
            case = f"{num_seqs} x {length}, blocks of {block_size}"
            scene = make_scene(
                [1] * num_seqs,
                [length] * num_seqs,
                num_decodes=num_seqs,
                block_size=block_size,
                heads=HEADS,
                head_dim=HEAD_DIM,
                poison=False,
            )
            found = []
            for tile in [own, *(tile for tile in DECODE_TILES if tile != own)]:
                with patch.object(decode, "decode_tile", lambda *_, tile=tile, **__: tile):
                    found.append((str(tile), _microseconds(scene)))
            for programs in (1, 2, 4, 6):
                with patch.object(decode, "PROGRAMS_PER_MULTIPROCESSOR", programs):
                    found.append((f"{programs} programs per multiprocessor", _microseconds(scene)))
            for length_of_part in (512, 1024):
                with patch.object(splits, "MIN_SPLIT", length_of_part):
                    found.append((f"parts of {length_of_part} keys", _microseconds(scene)))
            yield from _marked(case, found)


def tune_prefill() -> Iterator[Row]:
    own = prefill_tile(device_of(DEVICE).capability, packed_rows=4096, head_dim=HEAD_DIM, item_bytes=2)
    for num_seqs, length in ((1, 8192), (4, 2048)):
        scene = make_scene(
            [length] * num_seqs,
            [length] * num_seqs,
            num_decodes=0,
            block_size=64,
            heads=HEADS,
            head_dim=HEAD_DIM,
            poison=False,
        )
        found = []
        for tile in [own, *(tile for tile in PREFILL_TILES if tile != own)]:
            with patch.object(prefill, "prefill_tile", lambda *_, tile=tile, **__: tile):
                found.append((str(tile), _microseconds(scene)))
        yield from _marked(f"{num_seqs} x {length}", found)


def _microseconds(scene) -> float | None:  # type: ignore[no-untyped-def]
    """None: it does not fit the device."""
    backend = TritonPagedBackend()
    try:
        return seconds_of(lambda: scene.attend(backend), repeats=3, rounds=3) * 1e6
    except Exception as error:  # more shared memory than there is, above all
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        return None


def _marked(case: str, found: list[tuple[str, float | None]]) -> Iterator[Row]:
    fastest = min(time for _, time in found if time is not None)
    for what, time in found:
        yield case, what, "does not fit" if time is None else time, "fastest" if time == fastest else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"decode": tune_decode, "prefill": tune_prefill}
    parser.add_argument("--only", nargs="+", choices=list(tables), default=list(tables))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    print(heading(("torch", "triton")))
    for name in options.only:
        print(f"## {name}\n\n{markdown_table(('case', 'what', 'us', ''), tables[name]())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
