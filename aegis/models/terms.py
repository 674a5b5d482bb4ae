"""The terms on which checkpoints become images."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.model import EngineName, WeightsName


class Terms(Struct, frozen=True):
    """Those of a server, for all its models; a source may have a `dtype`, an engine and weights of its own.

    Images are in `cache_dir`, which is kept within `disk_bytes`. `ranks` share each model out. A checkpoint that cannot
    be made to fit in `limit_bytes` of each rank is not even loaded. An image is laid out for `engine`, its `weights`
    are dense or quantised, and if it `packs`, they are stored as this machine's processor multiplies them.
    """

    cache_dir: str
    dtype: str
    engine: EngineName = "transformers"
    ranks: int = 1
    packs: bool = False
    weights: WeightsName = "dense"
    limit_bytes: int | None = None
    disk_bytes: int | None = None
