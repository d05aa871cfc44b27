"""Triton's kernels run in its interpreter wherever tests meet them: see `tests.support.triton_interpreter`.

Set here, because other libraries import Triton too, and it reads the variable when it is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
