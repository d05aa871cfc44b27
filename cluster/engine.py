"""The engine loop: the body of a scheduler actor, one plain thread over selectors, without Ray and without asyncio.

Owns the order of a step (schedule, send, collect, postprocess, publish), the engine's state, and draining. It keeps at
most 1 + one_step_ahead steps in flight and never waits for anybody without a deadline. What ranks and ingresses
say is read in `cluster.rank_group` and `cluster.streams`, who they are in `cluster.greeter`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from cluster.errors import EngineFailed
from cluster.frames import Hello
from cluster.gathering import Gathering
from cluster.greeter import Greeter
from cluster.protocol import EngineState, Status
from cluster.rank_group import RankGroup
from cluster.reactor import Reactor
from cluster.streams import Streams
from cluster.transport import Listener, QueuedConnection
from configs.schema import EngineConfig
from scheduler.codec import decode_result, encode_plan
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
_LONGEST_WAIT_S = 1.0
_MAX_EXPLAINED = 20  # waiting requests in one report of a stall


class EngineLoop:
    """Joins ingresses, one Scheduler and its ranks. Construct, `start`, `wait_until_healthy`, ..., `drain`, `stop`.

    All methods may be called from any thread. `listener` is bound beforehand (`Listener(node_ip)`, port 0), so that
    its `.address` can be given to ranks and ingresses; both connect by themselves with the engine token. An engine
    that failed goes on to run: it answers every stream and every new request with the root error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        listener: Listener,
        *,
        config: EngineConfig,
        token: str,
        model: str,
        max_model_len: int,
        vocab_size: int,
        num_ranks: int,
        engine_epoch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._listener = listener
        self._clock = clock
        self._model, self._max_model_len, self._vocab_size = model, max_model_len, vocab_size
        self._stall_timeout_s = config.scheduler.stall_timeout_s
        self._reactor = Reactor()
        self._ranks = RankGroup(
            num_ranks,
            engine_epoch=engine_epoch,
            config=config.cluster,
            reactor=self._reactor,
            clock=clock,
            on_result=self._on_result,
        )
        self._gathering = Gathering()
        self._gathering_until = math.inf
        self._streams = Streams(
            scheduler,
            self._reactor,
            refusal=self._refusal,
            on_arrival=lambda: self._gathering.note_arrival(clock()),
        )
        self._greeter = Greeter(self._reactor, token=token, engine_epoch=engine_epoch, clock=clock, admit=self._admit)
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._state: EngineState = "starting"
        self._reason = ""
        self.is_reason_secondhand = False  # see `EngineFailed`
        self._draining = self._drained = False
        self._stopping = False
        self._num_checked_steps = 0
        self._last_progress = self._last_status = clock()
        self._status = self._make_status()
        self._thread = threading.Thread(target=self._run, name="antiphon-engine", daemon=True)

    # -- any thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. The engine is "starting" until every rank has connected, then "healthy"."""
        self._thread.start()

    def wait_until_healthy(self, timeout: float) -> None:
        """Wait for every rank to connect.

        Raises:
            EngineFailed: a rank failed, or did not connect within `timeout`; it is named.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state != "starting", timeout)
            state, reason = self._state, self._reason
        if state == "starting":
            ranks = ", ".join(map(str, self._ranks.missing))
            raise EngineFailed(f"rank {ranks} did not connect within {timeout:g} s")
        if state in ("failed", "stopped"):
            raise EngineFailed(reason or "the engine was stopped")

    def status(self) -> Status:
        """State and root error as of now, load as of the last second."""
        return self._status

    def fail(self, reason: str) -> None:
        """Another observer (Ray) saw the workers die: answer every stream with `reason`. The first reason stays."""
        self._command(lambda: self._fail(reason, is_secondhand=True))

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and let the others finish; True if all did within `timeout`, the rest is failed."""
        self._command(self._begin_drain)
        with self._changed:
            self._changed.wait_for(lambda: self._drained or self._state in ("failed", "stopped"), timeout)
            finished = self._drained
        if not finished:
            self._command(lambda: self._streams.fail_all(f"the engine is shutting down; its {timeout:g} s are over"))
        return finished

    def stop(self, timeout: float = 5.0) -> None:
        """Tell the ranks to leave, close every connection and the listener, end the thread. Idempotent."""
        if not self._thread.is_alive():
            self._listener.close()
            return
        self._command(self._begin_stop)
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the engine loop is stuck"

    def _command(self, action: Callable[[], None]) -> None:
        self._commands.append(action)
        self._reactor.wake()

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        self._reactor.listen(self._listener, self._greeter.on_peer)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        """One round: wait, handle what came, then see to deadlines. The one place where any error ends the engine."""
        try:
            now = self._clock()
            self._reactor.run_once(self._next_wait(now))
            while self._commands:
                self._commands.popleft()()
            self._fill_pipeline()
            self._look_after(self._clock())
        except EngineFailed as error:
            self._fail(str(error), is_secondhand=error.is_secondhand)
        except Exception as error:
            log.exception("the engine loop failed")
            self._fail(f"internal error of the scheduler: {type(error).__name__}: {error}")

    def _next_wait(self, now: float) -> float:
        longest = min(_LONGEST_WAIT_S, self._stall_timeout_s)
        if self._state in ("failed", "stopped"):
            return longest
        due = min(self._ranks.check(now), self._gathering_until)
        return min(max(due - now, 0.0), longest)

    def _fill_pipeline(self) -> None:
        """Schedule and send until enough steps are in flight or nothing can be scheduled."""
        self._gathering_until = math.inf
        if self._state not in ("healthy", "draining") or not self._ranks.is_complete:
            return
        while self._scheduler.num_steps_in_flight < self._scheduler.max_steps_in_flight:
            is_gathering = self._is_gathering()
            plan = self._scheduler.schedule(admits=not is_gathering)
            if plan is None:
                return
            if not is_gathering:
                self._gathering.note_start()
            self._ranks.send_plan(plan.step, encode_plan(plan))

    def _is_gathering(self) -> bool:
        """Whether the requests that wait do so for others that they come together with."""
        scheduler, now = self._scheduler, self._clock()
        if not 0 < scheduler.num_waiting < scheduler.config.max_num_seqs:
            return False
        num_ending = scheduler.num_ending
        if num_ending is None:
            return False
        due = self._gathering.due(num_ending, now)
        if due <= now:
            return False
        self._gathering_until = due
        return True

    def _on_result(self, payload: bytes) -> None:
        """The ranks get their next plan before the clients get their tokens."""
        self._last_progress = self._clock()
        num_before = self._scheduler.num_unfinished
        outputs = self._scheduler.postprocess(decode_result(payload))
        self._gathering.note_ends(num_before - self._scheduler.num_unfinished, self._last_progress)
        self._fill_pipeline()
        self._streams.publish(outputs)

    def _look_after(self, now: float) -> None:
        self._greeter.check(now)
        if self._state == "starting" and self._ranks.is_complete:
            self._set_state("healthy")
        if now - self._last_status >= STATUS_PERIOD_S:
            self._refresh_status(now)
            self._check_health()
        self._watch_for_stall(now)
        if self._draining and not self._streams.num_open and not self._reactor.num_pending_bytes:
            with self._changed:
                self._drained = True
                self._changed.notify_all()

    def _check_health(self) -> None:
        """Tell who was preempted, and look through the scheduler's books once after each busy time."""
        stats = self._scheduler.stats()
        if stats.preempted:
            names = ", ".join(map(str, stats.preempted[:_MAX_EXPLAINED]))
            log.info("preempted for want of KV blocks: %s (%d times since the start)", names, stats.num_preemptions)
        if not self._scheduler.has_unfinished and stats.num_steps != self._num_checked_steps:
            self._scheduler.check_integrity()
            self._num_checked_steps = stats.num_steps

    def _watch_for_stall(self, now: float) -> None:
        if not self._scheduler.has_unfinished:
            self._last_progress = now
        elif now - self._last_progress >= self._stall_timeout_s:
            self._last_progress = now
            scheduler = self._scheduler
            log.warning(
                "no progress for %g s: %d running, %d waiting, %d steps in flight",
                self._stall_timeout_s,
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.num_steps_in_flight,
            )
            for line in scheduler.explain_waiting()[:_MAX_EXPLAINED]:
                log.warning("no progress: %s", line)

    # -- state -----------------------------------------------------------------------------------------------

    def _refusal(self) -> str | None:
        if self._state == "healthy":
            return None
        return {
            "starting": "the engine is starting; try again in a moment",
            "draining": "the engine is draining: it finishes running requests and takes no new ones",
        }.get(self._state, f"the engine failed: {self._reason}")

    def _fail(self, reason: str, *, is_secondhand: bool = False) -> None:
        if self._state in ("failed", "stopped"):
            return
        log.error("engine failed: %s", reason)
        self._reason, self.is_reason_secondhand = reason, is_secondhand
        self._set_state("failed")
        self._streams.fail_all(reason)
        self._ranks.close()

    def _begin_drain(self) -> None:
        self._draining = True
        if self._state in ("starting", "healthy"):
            self._set_state("draining")

    def _begin_stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._streams.fail_all("the engine was stopped")
        self._ranks.shutdown()
        self._set_state("stopped")
        deadline = self._clock() + 1.0
        with contextlib.suppress(Exception):  # a peer that fails now changes nothing
            # Until the ranks have gone by themselves: closing on unread frames could destroy what was sent.
            while (self._ranks.num_connected or self._reactor.num_pending_bytes) and self._clock() < deadline:
                self._reactor.run_once(0.05)
        self._reactor.close()
        self._listener.close()

    def _set_state(self, state: EngineState) -> None:
        with self._changed:
            self._state = state
            self._refresh_status(self._clock())
            self._changed.notify_all()

    def _refresh_status(self, now: float) -> None:
        self._last_status = now
        self._status = self._make_status()
        self._streams.broadcast(self._status)

    def _make_status(self) -> Status:
        return Status(
            state=self._state,
            reason=self._reason,
            model=self._model,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            engine_epoch=self._ranks.engine_epoch,
            num_ranks=self._ranks.num_ranks,
            num_ranks_alive=0 if self._state in ("failed", "stopped") else self._ranks.num_connected,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
        )

    def _admit(self, hello: Hello, connection: QueuedConnection, welcome: bytes) -> None:
        """The greeter vouches for the token; ranks and ingresses go their own ways. Raises: HandshakeRefused."""
        if hello.role == "rank":
            self._ranks.join(hello, connection)
            self._reactor.send(connection, welcome)
        else:
            self._reactor.send(connection, welcome)
            self._streams.join(hello.name, connection, self._status)
