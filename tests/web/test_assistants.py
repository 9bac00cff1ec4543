"""MCP over HTTP: a real daemon, queried by the SDK's own client."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from tests.daemon.simulated import SimulatedRank
from tests.web.conftest import Served

pytest.importorskip("mcp", reason="the MCP SDK is not installed (pip install 'training-sentinel[mcp]')")

from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import TextResourceContents

from tests.cli.test_mcp import check_incidents, keep, read_text

pytestmark = pytest.mark.processes


async def ask(served: Served) -> list[str]:
    """Check incidents and a section of the runbook, and return the names of all tools."""
    http = httpx2.AsyncClient(headers=served.authorized(), timeout=60.0)
    transport = streamable_http_client(f"{served.url}/mcp", http_client=http)
    async with http, Client(transport, read_timeout_seconds=60.0) as client:
        found = json.loads(read_text(await client.call_tool("list_incidents", {})))
        check_incidents(found["data"]["incidents"])
        (content,) = (await client.read_resource("sentinel://runbook/LossSpike")).contents
        assert isinstance(content, TextResourceContents)
        assert "batch" in content.text
        return [tool.name for tool in (await client.list_tools()).tools]


@pytest.mark.slow
def test_the_daemon_serves_the_reading_tools(served: Served) -> None:
    keep("train")

    async def ask_twice_at_once() -> list[list[str]]:
        return await asyncio.gather(ask(served), ask(served))

    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(0, [1.0])
        for tools in asyncio.run(ask_twice_at_once()):
            assert {"list_runs", "survey_hang"} <= set(tools)
            assert {"silence_alert", "reload_rules"}.isdisjoint(tools)
            assert "plan_memory" in tools
            assert "read_memory_snapshot" not in tools, "it opens files"
        assert rank.ask("status")["runs"][0]["values"]["loss"] == 1.0
    served.process.terminate()
    assert served.process.wait(60) == 0


def test_without_the_token_or_by_another_host_name_nothing_is_served(served: Served) -> None:
    assert served.get("/mcp").status_code == 401
    wrong = {"Authorization": "Bearer wrong"}
    assert httpx2.post(f"{served.url}/mcp", json={}, headers=wrong).status_code == 401
    assert served.get("/mcp", headers={**served.authorized(), "Host": "somewhere.example"}).status_code == 400
