"""docs/promises.md#agents: an agent that hangs up before its answer comes leaves no connection and no
traceback."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from laminar_hpc.environments.gateway.chat import DrawnTurn, completion
from laminar_hpc.environments.gateway.server import Gateway


@pytest.mark.parametrize("stream", [True, False])
async def test_who_hangs_up(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The turn is drawn all the same: whoever asks again has it."""
    gateway = Gateway(100)
    await gateway.start()
    try:
        door = gateway.open()
        url = urlsplit(door.url)
        body = {"model": "policy", "messages": [{"role": "user", "content": "go"}], "stream": stream}
        raw = json.dumps(body).encode()
        lines = [f"POST {url.path}/chat/completions HTTP/1.1", f"Host: {url.netloc}"]
        lines += [f"Authorization: Bearer {door.key}", f"Content-Length: {len(raw)}", "", ""]
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write("\r\n".join(lines).encode() + raw)
        async with asyncio.timeout(60):
            question = await door.question()
            writer.transport.abort()
            server = gateway._runner.server
            assert server is not None
            while any(connection.transport for connection in server.connections):
                await asyncio.sleep(0.01)
            said = {"role": "assistant", "content": "hm"}
            turn = DrawnTurn(1, 0, [1], [2], [0.0], [], said, "stop", 0)
            door.answer(completion(turn, question.chat), said)
            while server.connections:
                await asyncio.sleep(0.01)
            answer = await door.ask(question.chat)
        assert answer["choices"][0]["message"] == said
    finally:
        await gateway.close()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
