"""What was promised to clients is kept when instances join."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from aegis.core.errors import UserError
from aegis.core.model import Slo
from aegis.models.sources import Source
from aegis.runtime.catalogue import Catalogue, LiveModel
from aegis.runtime.registering import register
from aegis.sim.faults.pretended import make_spec
from memory.budget import Budget
from tests.parity.stand_ins import no_images

PAGE = 2 << 20


def _catalogue(*, host_slabs: int, context_tokens: int) -> Catalogue:
    """Of one model, whose KV the device holds more of than the host; two instances."""
    budget = Budget(pages=100, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=host_slabs, instances=2)
    made = make_spec(0, image_pages=3, block_bytes=PAGE)
    spec = msgspec.structs.replace(made, manifest=msgspec.structs.replace(made.manifest, context_tokens=context_tokens))
    images = no_images()
    catalogue = Catalogue(
        cast(Any, None),
        budget,
        images,
        register,
        dtype="float32",
        engine="transformers",
        cache_dir=Path(),
        default_slo=Slo(),
    )
    limit = budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
    source = Source(spec.model, Path(), None, Slo())
    catalogue._models[spec.model] = LiveModel(spec, source, images, None, limit, 0)
    return catalogue


def test_host_memory_is_shared_among_more_where_that_breaks_no_promise() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=16)
    catalogue.share_among(5)
    assert catalogue.budget.instances == 5
    with pytest.raises(UserError, match="holds 10 KV slabs, 6 instances need 12; raise it"):
        catalogue.share_among(6)
    assert catalogue.budget.instances == 5


def test_a_long_request_that_was_promised_still_fits() -> None:
    catalogue = _catalogue(host_slabs=10, context_tokens=1 << 20)
    with pytest.raises(UserError, match=r"with 3 instances host memory holds KV of .* tokens of .* were promised"):
        catalogue.share_among(3)
    assert catalogue.budget.instances == 2


@pytest.mark.parametrize("source", ["/etc", "../../x", "a\0b"])
def test_what_is_no_checkpoint_is_refused_by_the_parameter_s_name(source: str) -> None:
    with pytest.raises(UserError) as refusal:
        asyncio.run(_catalogue(host_slabs=10, context_tokens=16).add(source, None))
    assert refusal.value.param == "source" and refusal.value.message
