"""Requests that show what steps cost, sent to a server that is otherwise idle."""

from __future__ import annotations

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.telemetry.node_report import NodeReport
from bench.calibration import past
from bench.calibration.past import Past
from bench.serve import suite
from bench.serve.settings import Settings
from bench.workloads.grid import Grid


def probed(url: str) -> Past:
    """What the server did with a grid of requests to each of its models. Raises UserError."""
    client = AdminClient(url)
    start = past.mark(client)
    suite.run(Settings(base_url=url, workload=grid_for(client.node()), map="round-robin"))
    return past.settled(client, start)


def grid_for(node: NodeReport) -> str:
    """The workload: of as many models as there are, with prompts that all of them take. Raises UserError."""
    if not node.models:
        raise UserError("the server has no models to probe")
    usual, shortest = Grid(), min(spec.manifest.context_tokens for spec in node.models)
    answer = min(usual.answer, max(shortest // 2, 1))
    return f"grid:models={len(node.models)},prompt={max(min(usual.prompt, shortest - answer), 1)},answer={answer}"
