"""The KV blocks of a sequence one by one, as an engine looks them up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aegis.core.ids import BlockRun

BlockTable = npt.NDArray[np.int64]
"""`[blocks]`: number i holds positions `[i * block_tokens, (i + 1) * block_tokens)`."""


def block_table(runs: Sequence[BlockRun]) -> BlockTable:
    """The table of the blocks in these runs, of which there is at least one."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])
