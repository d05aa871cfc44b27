"""Sequences, KV blocks and steps. Importing this package needs neither torch nor Ray."""

from scheduler.output import StepPlan, StepResult
from scheduler.request import QueueFullError, Request, SequenceOutput
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler, StepMismatchError
from scheduler.sequence import Sequence, SequenceStatus

__all__ = [
    "QueueFullError",
    "Request",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "SequenceOutput",
    "SequenceStatus",
    "StepMismatchError",
    "StepPlan",
    "StepResult",
]
