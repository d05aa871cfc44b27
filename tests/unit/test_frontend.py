"""The asyncio client: streams of text from one or two engines, aborts, losses, and the choice of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import GenerationFailed, InvalidRequest, Unavailable
from cluster.frontend import Frontend
from cluster.generation import Delta, Generation, GenerationOptions
from cluster.router import CHUNK_TOKENS, Router
from cluster.text.processor import TextProcessor
from cluster.transport import Address, Listener
from scheduler.sampling_params import SamplingParams, derive_seed
from tests.support.fake_ranks import expected_tokens
from tests.support.small_engine import TOKEN, SmallEngine, make_config, running_engine
from tests.support.tiny_text import write_tiny_tokenizer

PROMPT = [5, 6, 7, 8]
LONG = SamplingParams(max_tokens=400)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.from_directory(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def with_frontend(
    text: TextProcessor, engines: list[SmallEngine], work: Callable[[Frontend], Coroutine[Any, Any, Any]]
) -> Any:
    async def main() -> Any:
        async with Frontend([engine.address for engine in engines], token=TOKEN, text=text) as frontend:
            return await asyncio.wait_for(work(frontend), 10.0)

    return asyncio.run(main())


async def collect(frontend: Frontend, prompt: str | list[int], params: SamplingParams, **options: Any) -> list[Delta]:
    return [delta async for delta in frontend.generate(prompt, params, GenerationOptions(**options))]


def joined(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3.0):
        while not condition():  # noqa: ASYNC110 - it happens in another thread
            await asyncio.sleep(0.005)


def test_concurrent_prompts_each_get_their_own_text(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        prompts = [f"prompt {number}" for number in range(16)]
        found = await asyncio.gather(*(collect(frontend, p, SamplingParams(max_tokens=30)) for p in prompts))
        for prompt, deltas in zip(prompts, found, strict=True):
            tokens = expected_tokens(text.tokenizer.encode(prompt), 30)
            assert joined(deltas) == text.tokenizer.decode(tokens)
            assert [token for delta in deltas for token in delta.token_ids] == tokens
            assert deltas[-1].finish_reason == "length"

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_a_stop_string_ends_the_text_and_frees_the_engine(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        whole = text.tokenizer.decode(expected_tokens(PROMPT, 400))
        stop = whole[20:23]
        deltas = await collect(frontend, PROMPT, LONG, stop=(stop,))
        assert joined(deltas) == whole[: whole.index(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
        assert joined(await collect(frontend, PROMPT, LONG, stop=(stop,), include_stop_str_in_output=True)).endswith(
            stop
        )

    with running_engine(seconds_per_step=0.002) as engine:
        with_frontend(text, [engine], work)
        assert engine.scheduler.stats().num_sampled_tokens < 200


def test_prompt_scores_that_no_frame_holds_are_refused(text: TextProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.frontend.MAX_SCORES", 4 * len(PROMPT) * (3 + 2 * 5))

    async def work(frontend: Frontend) -> None:
        await frontend.submit(PROMPT, SamplingParams(prompt_logprobs=5, max_tokens=1))
        with pytest.raises(InvalidRequest, match="ask for fewer alternatives"):
            await frontend.submit(PROMPT, SamplingParams(prompt_logprobs=6, max_tokens=1))

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_leaving_the_iteration_aborts_the_request(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        async with contextlib.aclosing(frontend.generate(PROMPT, LONG)) as deltas:
            async for _ in deltas:
                break
        await wait_until(lambda: not engine.scheduler.has_unfinished)

    with running_engine(seconds_per_step=0.005) as engine:
        with_frontend(text, [engine], work)


def test_a_conversation_goes_through_the_chat_template(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        messages = [{"role": "user", "content": "hello"}]
        prompt = text.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
        assert max(prompt) > 261, "special tokens are encoded as themselves"
        found = [delta async for delta in frontend.chat(messages, SamplingParams(max_tokens=5))]
        assert joined(found) == text.tokenizer.decode(expected_tokens(prompt, 5))

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_what_the_scheduler_refuses_is_raised_with_its_reason(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        with pytest.raises(InvalidRequest, match="600"):
            await collect(frontend, [1] * 600, SamplingParams())
        with pytest.raises(InvalidRequest, match="empty"):
            await collect(frontend, [], SamplingParams())
        assert joined(await collect(frontend, PROMPT, SamplingParams(max_tokens=1)))

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_a_lost_rank_reaches_every_stream_after_the_text_before_it(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        seen: list[Delta] = []
        with pytest.raises(GenerationFailed, match="rank 0 on node test, pid 1000 died"):  # noqa: PT012
            async for delta in frontend.generate(PROMPT, LONG):
                seen.append(delta)
                if len(seen) == 3:
                    engine.ranks[0].die()
        assert text.tokenizer.decode(expected_tokens(PROMPT, 400)).startswith(joined(seen))
        assert not frontend.is_healthy
        assert "died" in frontend.problems()[0]
        with pytest.raises(Unavailable, match="died"):
            await collect(frontend, PROMPT, LONG)

    with running_engine(seconds_per_step=0.005) as engine:
        with_frontend(text, [engine], work)


def test_a_lost_scheduler_fails_its_streams_and_its_successor_is_found(
    text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.replica_client.RECONNECT_PERIOD_S", 0.02)

    async def work(frontend: Frontend, engine: SmallEngine) -> None:
        stream = frontend.generate(PROMPT, LONG)
        await anext(stream)
        await asyncio.to_thread(engine.loop.stop)
        with pytest.raises(GenerationFailed, match="was stopped"):
            async for _ in stream:
                pass
        await wait_until(lambda: frontend.status() == [None])
        with pytest.raises(Unavailable, match="no replica takes requests"):
            await collect(frontend, PROMPT, LONG)
        with running_engine(port=engine.address.port):
            await wait_until(lambda: frontend.is_healthy)
            assert joined(await collect(frontend, PROMPT, SamplingParams(max_tokens=3)))

    with running_engine(seconds_per_step=0.005) as engine:
        with_frontend(text, [engine], lambda frontend: work(frontend, engine))


def test_a_scheduler_that_falls_silent_is_given_up(text: TextProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than the second after which a healthy scheduler speaks, so that silence is all there is."""
    monkeypatch.setattr("cluster.replica_client.SILENCE_TIMEOUT_S", 0.1)

    async def work(frontend: Frontend) -> None:
        engine.ranks[0].model.blocked.set()
        with pytest.raises(GenerationFailed, match=r"no sign of life for 0\.1 s"):
            await collect(frontend, PROMPT, LONG)

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_no_scheduler_at_all_is_said_within_the_deadline(text: TextProcessor) -> None:
    async def work() -> None:
        listener = Listener("127.0.0.1")
        listener.close()
        frontend = Frontend([Address("127.0.0.1", listener.address.port)], token=TOKEN, text=text)
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"no scheduler answered within 0.05 s \(127.0.0.1"):
            await frontend.start(0.05)
        assert time.monotonic() - started < 1.0

    asyncio.run(work())


def test_the_other_replica_takes_over_new_requests_when_one_has_failed(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        await wait_until(lambda: None not in frontend.status())
        first.ranks[0].die()
        await wait_until(lambda: len(frontend.problems()) == 1)
        assert frontend.is_healthy
        for _ in range(3):
            assert joined(await collect(frontend, PROMPT, SamplingParams(max_tokens=3)))

    with running_engine() as first, running_engine() as second:
        with_frontend(text, [first, second], work)
        assert second.scheduler.stats().num_finished == 3


def test_requests_are_spread_over_replicas(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        await wait_until(lambda: None not in frontend.status())
        await asyncio.gather(*(collect(frontend, [number], SamplingParams(max_tokens=20)) for number in range(8)))

    with running_engine(seconds_per_step=0.002) as first, running_engine(seconds_per_step=0.002) as second:
        with_frontend(text, [first, second], work)
        assert [engine.scheduler.stats().num_finished for engine in (first, second)] == [4, 4]


def test_numbers_that_are_no_token_ids_are_refused_before_a_replica_is_chosen(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        await wait_until(lambda: None not in frontend.status())
        with pytest.raises(InvalidRequest, match="token ids must lie"):
            await collect(frontend, [10**30] * CHUNK_TOKENS, SamplingParams(max_tokens=3))

    with running_engine() as first, running_engine() as second:
        with_frontend(text, [first, second], work)


def test_a_full_replica_passes_the_request_on(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> None:
        await wait_until(lambda: None not in frontend.status())
        prompt = [9] * CHUNK_TOKENS
        found = await asyncio.gather(*(collect(frontend, prompt, SamplingParams(max_tokens=30)) for _ in range(6)))
        assert len(found) == 6

    config = make_config(max_num_seqs=1, max_num_waiting=3)
    with (
        running_engine(config, seconds_per_step=0.002) as first,
        running_engine(config, seconds_per_step=0.002) as second,
    ):
        with_frontend(text, [first, second], work)
        assert first.scheduler.stats().num_finished >= 3
        assert second.scheduler.stats().num_finished >= 2


def test_a_request_can_be_put_to_another_scheduler_as_it_stands(text: TextProcessor) -> None:
    """What recovery of a lost scheduler will do, with the contracts of today."""

    async def work(frontend: Frontend) -> None:
        params = SamplingParams(max_tokens=12, seed=3)
        begun = Generation(1, PROMPT, params, GenerationOptions(), text.tokenizer)
        for token in expected_tokens(PROMPT, 5):
            begun.push(0, token, None, None)
        message = begun.message()
        assert message.num_delivered == 5
        replica = frontend._replicas[0]
        replica.submit(begun)
        deltas = [delta async for batch in begun for delta in batch]
        assert begun.delivered == [expected_tokens(PROMPT, 12)]
        assert joined(deltas) == text.tokenizer.decode(expected_tokens(PROMPT, 12))

    with running_engine() as engine:
        with_frontend(text, [engine], work)


def test_text_n_of_a_request_has_the_seed_that_it_would_have_alone() -> None:
    assert derive_seed(derive_seed(7, 2), 0) == derive_seed(7, 2)


def test_every_request_has_a_definite_seed_and_runs_are_repeatable(text: TextProcessor) -> None:
    async def work(frontend: Frontend) -> list[int | None]:
        return [(await frontend.submit(PROMPT, SamplingParams(max_tokens=1))).params.seed for _ in range(3)]

    with running_engine() as engine:
        first, second = with_frontend(text, [engine], work), with_frontend(text, [engine], work)
    assert first == second
    assert len(set(first)) == 3


# -- router ------------------------------------------------------------------------------------------------------


def prompt_of(num_chunks: int, last: int = 0) -> list[int]:
    return [*range(num_chunks * CHUNK_TOKENS), last]


def test_the_idlest_replica_is_first_and_lost_ones_are_left_out() -> None:
    assert Router().order([1], [5, None, 2, 3]) == [2, 3, 0]
    assert Router().order([1], [None, None]) == []


def test_a_replica_that_holds_the_prefix_is_preferred_until_it_is_much_busier() -> None:
    router = Router(slack=4)
    router.note(prompt_of(3), 1)
    assert router.order(prompt_of(2, 9), [0, 4]) == [1, 0]
    assert router.order(prompt_of(2, 9), [0, 5]) == [0, 1]
    assert router.order(prompt_of(2, 9), [0, None]) == [0]


def test_the_longest_remembered_prefix_decides() -> None:
    router = Router()
    router.note(prompt_of(3), 2)
    router.note(prompt_of(1), 1)
    assert router.order(prompt_of(1), [0, 1, 1])[0] == 1
    assert router.order(prompt_of(4), [0, 1, 1])[0] == 2


def test_prefixes_are_shared_only_within_a_cache_salt() -> None:
    router = Router()
    router.note(prompt_of(2), 1, "mine")
    assert router.order(prompt_of(2), [0, 1], "mine")[0] == 1
    assert router.order(prompt_of(2), [0, 1])[0] == 0


def test_the_memory_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cluster.router.MAX_REMEMBERED", 3)
    router = Router()
    for first in range(5):
        router.note([first] * 2 * CHUNK_TOKENS, 1)
    assert router.order([4] * CHUNK_TOKENS, [0, 1])[0] == 1
    assert router.order([0] * CHUNK_TOKENS, [0, 1])[0] == 0
