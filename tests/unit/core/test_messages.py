"""Messages between processes survive encoding and decoding."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from aegis.core import messages
from aegis.core.ids import InstanceId, ModelId, PageRun, ProxyId, RequestId, SlabId
from aegis.core.messages import FromInstance, ToInstance
from aegis.core.model import Slo
from aegis.core.request import EventHandle, FinishReason, Job, KeptPrefix, KvHandle, Sampling, Token
from aegis.core.role import Role
from aegis.sim.faults.fake_models import make_spec

M, R, P, X = ModelId("m"), RequestId(3), InstanceId("prefill-0"), ProxyId(2)
JOB = Job(R, 2, M, (1, 2), Sampling(max_tokens=4, logit_bias=((5, -1.0),), logprobs=2), 17, (9,))
KV = KvHandle(P, ((4, 6), (0, 1)), 30, EventHandle(6, 7))
TOKEN = Token(8, -0.5, ((8, -0.5), (9, -1.5)))
SLABS = messages.SlabsOfShape("host", (M,), 100, 30, 2, 3, 1, 1, 1)

TO = [
    messages.AddModel(make_spec(0, image_pages=1, block_bytes=128)),
    messages.SetSlo(M, Slo(3, 4)),
    messages.DropModel(M),
    messages.UnloadModel(M),
    messages.Submit(JOB, 5),
    messages.Submit(replace(JOB, kept=KeptPrefix(((4, 6),), 32, 12))),
    messages.Adopt(JOB, (9, 8), KV),
    messages.BringIn(M),
    messages.HandOver(R, 2, with_kv=False),
    messages.Cancel(R, 2),
    messages.ReleaseKv(R, 2),
    messages.GrantSlabs((SlabId(1),), refused=False),
    messages.GrantPages((PageRun(0, 3), PageRun(5, 6))),
    messages.GrantPages((), refused=True, excessive=True),
    messages.TakeBack(7, 3, 2_000_000_000),
    messages.TakeBack(8, 3, 2_000_000_000, gentle=True, keep=2),
    messages.ImageCached(M, (PageRun(4, 9),)),
    messages.CarryImage(P, EventHandle(6, 7), 1, 99, (PageRun(4, 9),), (3, 4)),
    messages.PeerReady(EventHandle(6, 7), 1, P, "there", (PageRun(4, 9),), 5),
    messages.EvictImage(M),
    messages.KeepKv(4, 2, ((7, 9),)),
    messages.PrefixChecked(R, 2, True),
    messages.KvFetched(R, 2, "why"),
    messages.ForgetPeer(P, (3, 4)),
    messages.MeetProxy(X, "ipc://there"),
    messages.DropProxy(X),
    messages.ReleaseProxy(X),
    messages.Ping(),
    messages.Shutdown(),
]
FROM = [
    messages.Ready(1),
    messages.Greeting(Role.MIXED),
    messages.Pong(),
    messages.ModelAdded(M),
    messages.ModelFailed(M, "why"),
    messages.ModelDropped(M),
    messages.ModelUnloaded(M),
    messages.Started(R, 2),
    messages.Tokens(R, 2, 1, (TOKEN,), FinishReason.STOP),
    messages.Prefilled(R, 2, TOKEN, KV, 99),
    messages.PromptLogprobs(R, 2, (TOKEN,)),
    messages.Reused(R, 2, 32),
    messages.KvReleased(R, 2, KV),
    messages.BroughtIn(M, there=True),
    messages.HandedOver(R, 2, 9, KV),
    messages.Phase((R,), running=True),
    messages.GaveUp(R, 2),
    messages.Broken(R, 2, "why"),
    messages.NeedLinks(EventHandle(6, 7), 99, (PageRun(4, 9),), ((3, 4), (5, 6))),
    messages.LoadOver(EventHandle(6, 7)),
    messages.CarryBegan(P, EventHandle(6, 7), 1, (PageRun(4, 9),), 5),
    messages.CarryOver(P, EventHandle(6, 7)),
    messages.OfferKv(4, M, b"12345678"),
    messages.KvKept(4, True),
    messages.CheckPrefix(R, 2, 12),
    messages.FetchKv(R, 2, KV, ((3, 5),), 64),
    messages.NeedSlabs(2),
    messages.ReturnSlabs((SlabId(1),)),
    messages.NeedPages(3, urgent=True),
    messages.GaveBack(7, (PageRun(1, 4),)),
    messages.GaveBack(8, (), refused=True, spare=2),
    messages.ImageEvicted(M),
    messages.ImageUnreadable(M, "why"),
    messages.PeerForgotten(P),
    messages.ProxyDropped(X),
    messages.SwitchDone(M, True, 1, 2, 3, 4),
    messages.StepsTook(M, 500, 3, 12_000_000),
    messages.Telemetry(M, (M,), 1, 2, {"steps_total": 3}, {"device_pages": 4}, (M,), (SLABS,)),
]


@pytest.mark.parametrize("message", TO, ids=lambda m: type(m).__name__)
def test_to_an_instance(message: ToInstance) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([message]), type=list[ToInstance]) == [message]


@pytest.mark.parametrize("message", FROM, ids=lambda m: type(m).__name__)
def test_from_an_instance(message: FromInstance) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([message]), type=list[FromInstance]) == [message]


def test_runs_of_pages_are_runs_again_on_the_other_side() -> None:
    grant = messages.GrantPages((PageRun(0, 3),))
    (decoded,) = msgspec.msgpack.decode(msgspec.msgpack.encode([grant]), type=list[ToInstance])
    assert isinstance(decoded, messages.GrantPages) and [run.pages for run in decoded.runs] == [3]


def test_no_message_is_left_out() -> None:
    assert {type(m) for m in TO} == set(ToInstance.__args__)
    assert {type(m) for m in FROM} == set(FromInstance.__args__)
