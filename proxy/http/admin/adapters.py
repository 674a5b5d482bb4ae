"""Adding and removing LoRA adapters as vLLM has it: `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`.

An adapter is a model like others here: what these do is `/models/load` and `/models/unload`, of adapters alone, under
the same rules, with vLLM's fields and replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import APIRouter, Depends, Request, Response

from aegis.core.errors import UserError
from aegis.telemetry.registration import Waiting
from proxy.http.client_disconnect import while_connected
from proxy.http.fields import Fields
from proxy.http.openai.models import find
from proxy.http.openapi import COMMANDING, PLAIN, operation
from proxy.http.parameters import Integer, Text
from proxy.http.request.body import read_body
from proxy.http.security.authorise import authorise
from proxy.http.settings import market_of, queries_of, settings_of


class LoadAdapterBody(Fields):
    lora_name = Text(None, required=True)
    lora_path = Text(None, most_characters=4096, required=True)
    base_model_name = Text(None)


class UnloadAdapterBody(Fields):
    lora_name = Text(None, required=True)
    lora_int_id = Integer(None, low=0)


_OF_LOADING = {"name": "lora_name", "source": "lora_path", "base": "base_model_name"}
_OF_UNLOADING = {"model": "lora_name"}

router = APIRouter(dependencies=[Depends(authorise)])


@router.post(
    "/v1/load_lora_adapter",
    **operation("Serve a LoRA adapter", takes=LoadAdapterBody, kinds=(PLAIN,), problems=COMMANDING),
)
async def load_lora_adapter(request: Request) -> Response:
    """Body: `lora_name`, what clients shall call it, `lora_path`, its directory or hub id, and `base_model_name`, the
    model here that it is run with; left out, the one that the adapter itself names."""
    body = await read_body(request, LoadAdapterBody, settings_of(request).body_bytes_max)
    name, path, base = body.lora_name, body.lora_path, body.base_model_name
    body.end()
    for field, value in (("lora_name", name), ("lora_path", path)):
        if not value:
            raise body.invalid(field, "is required")
    with _named(_OF_LOADING):
        adding = queries_of(request).add_model(path or "", name, base=base or "")
        added = await while_connected(request.receive, adding)
    assert not isinstance(added, Waiting), "adapters are not lazy"
    return _told(f"Success: LoRA adapter '{name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    **operation("Serve a LoRA adapter no more", takes=UnloadAdapterBody, kinds=(PLAIN,), problems=COMMANDING),
)
async def unload_lora_adapter(request: Request) -> Response:
    """Body: `lora_name`. `lora_int_id`, vLLM's own number, is ignored."""
    body = await read_body(request, UnloadAdapterBody, settings_of(request).body_bytes_max)
    name, _ = body.lora_name, body.lora_int_id
    body.end()
    if not name:
        raise body.invalid("lora_name", "is required")
    with _named(_OF_UNLOADING):
        served = find(market_of(request), name)
    if served.spec.base is None:
        raise UserError(f"'{name}' is no adapter; /models/unload removes models", param="lora_name")
    await queries_of(request).remove_model(name)
    return _told(f"Success: LoRA adapter '{name}' removed successfully.")


@contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Raises UserErrors of the block with the fields that these bodies have."""
    try:
        yield
    except UserError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _told(text: str) -> Response:
    return Response(text, media_type=PLAIN)
