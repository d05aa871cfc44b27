"""What a rank keeps of its log for the driver and until when, and what the collector sees of imports."""

from __future__ import annotations

import gc
import logging

from cluster.actors import _Said
from cluster.collector import uncollected


def test_what_a_rank_chose_is_kept_until_it_serves_and_then_logged_as_before():
    logger = logging.getLogger("workers.compute")
    said = _Said()
    try:
        logger.info("compute: %s", "kernels")
        assert said.lines == ["compute: kernels"]
    finally:
        said.close()
    logger.warning("later")
    assert said.lines == ["compute: kernels"]
    assert said not in logging.getLogger("workers").handlers
    assert logging.getLogger("workers").level == logging.NOTSET


def test_what_is_imported_is_never_visited_by_the_collector_which_works_again_afterwards():
    try:
        with uncollected():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= len(made)
    finally:
        gc.unfreeze()
