"""What a rank keeps of its log for the driver, and until when."""

from __future__ import annotations

import logging

from cluster.actors import _Said


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
