"""A run of steps on a CPU in which the same sequences decode, each from the token that it sampled in the step before.

Most steps are like that. What C++ reads and writes in them is laid out once; a step touches what changes and no more,
and does so before the kernels run, because afterwards all that Python works with has left the caches. Owns these arrays
and which plans go on with a run. Knows neither how a run begins (`workers.model_runner`) nor how a step is computed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from scheduler.output import UNKNOWN_TOKEN, StepPlan, StepResult
from workers.cpu_decoder import CpuDecoder
from workers.cpu_sampler import CpuSampler
from workers.input_batch import InputBatch, StepRows
from workers.kv_cache import KVCache
from workers.plan_check import check_room
from workers.sampler import SamplingRows


class DecodeRun:
    """Goes on from `rows`, a step of nothing but decode rows that is computed, and samples as `asked`.

    The caller ends it before a plan that does not go on, and lets nobody else compute or change slots until then.
    """

    def __init__(
        self,
        rows: StepRows,
        asked: SamplingRows,
        *,
        batch: InputBatch,
        kv: KVCache,
        decoder: CpuDecoder,
        sampler: CpuSampler,
    ) -> None:
        self._batch = batch
        self._slots = slots = rows.slots
        self._slot_bytes = slots.tobytes()
        self._unknown_bytes = np.full(len(slots), UNKNOWN_TOKEN, np.int32).tobytes()
        self._num_steps_here = 0  # before a row enters a block
        self._seq_lens = rows.seq_lens.copy()
        self._block_tables = batch.table.block_table[slots]
        tokens = batch.last_tokens[rows.sampling_slots_on_device]
        self._tokens = tokens.numpy().astype(np.int32)
        self._sampled = [self._tokens.copy()]  # from the step before the run on
        # The position of each row's token, its place in the cache, and the positions that drawn rows sample.
        lens = rows.attention.seq_lens.long()
        drawn_lens = lens[:0] if asked.drawn is None else lens[asked.drawn.rows]
        counters = torch.cat([lens - 1, lens, drawn_lens])
        positions, places, sampled = counters.split([len(lens), len(lens), len(drawn_lens)])
        self._counters, self._positions, self._places = counters.numpy(), positions.numpy(), places.numpy()
        meta = replace(
            rows.attention,
            seq_lens=torch.from_numpy(self._seq_lens),
            block_tables=torch.from_numpy(self._block_tables),
            slot_mapping=places,
        )
        if asked.drawn is not None:
            asked = replace(asked, drawn=replace(asked.drawn, positions=sampled))
        step = decoder.lay_out(tokens, positions, kv, meta)
        self._decode = decoder.decoding(step, asked, sampler, tokens, self._tokens)

    def end(self) -> None:
        """Tell the batch what was computed; until then it stands where the run began."""
        self._batch.note_run(self._slots, self._sampled[1:])

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether it decodes one more token of each row and of no other, from the one that the row has sampled."""
        # As bytes, which are quicker to compare than arrays of few numbers.
        return (
            plan.decode_slots.tobytes() == self._slot_bytes
            and plan.decode_tokens.tobytes() in (self._unknown_bytes, self._sampled[-1].tobytes())
            and not (plan.prefill_slots.size or plan.admitted or plan.released_slots.size or plan.copied_from.size)
        )

    def step(self, plan: StepPlan) -> StepResult:
        """Compute a plan that goes on.

        Raises:
            PlanError: it contradicts what this rank holds.
        """
        self._seq_lens += 1
        self._counters += 1
        if plan.grown_slots.size or not self._num_steps_here:
            self._enter_blocks(plan)
        self._num_steps_here -= 1
        self._decode()
        tokens = self._tokens.copy()
        self._sampled.append(tokens)
        return StepResult(plan.engine_epoch, plan.step, slots=self._slots, tokens=tokens)

    def _enter_blocks(self, plan: StepPlan) -> None:
        """Where the rows are now; and for how many steps they go on from there, place by place."""
        table = self._batch.table
        self._batch.append_blocks(plan.grown_slots, plan.grown_blocks)
        check_room(table, self._slots, self._seq_lens)
        np.take(table.block_table, self._slots, axis=0, out=self._block_tables)
        self._places[:] = table.places_of(self._slots, self._positions)
        in_block = table.block_size - int((self._positions % table.block_size).max())
        self._num_steps_here = min(in_block, table.max_model_len + 1 - int(self._seq_lens.max()))
