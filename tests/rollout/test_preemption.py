"""docs/running.md#rollouts-come-and-go: what counts as a notice that the machine will be taken back, and how
many seconds it leaves."""

import asyncio
import time

import pytest
from aiohttp import web

from laminar_hpc.rollout import preemption
from laminar_hpc.rollout.preemption import GRACE_SECONDS, NoNotice, noticed, seconds_left, seconds_of_file

NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("", None),
        ("FALSE", None),
        ("NONE\n", None),
        ("TRUE", GRACE_SECONDS),
        ('{"action": "terminate", "time": "2027-01-15T08:02:00Z"}', 120.0),
        ('{"action": "stop", "time": "2027-01-15T07:00:00Z"}', 0.0),
        ('{"action": "hibernate"}', GRACE_SECONDS),
        ("2027-01-15T08:01:30Z", 90.0),
        ('{"DocumentIncarnation": 2, "Events": []}', None),
        ('{"Events": [{"EventType": "Freeze", "NotBefore": ""}]}', None),
        ('{"Events": [{"EventType": "Preempt", "NotBefore": "Fri, 15 Jan 2027 08:00:45 GMT"}]}', 45.0),
        ('{"Events": [{"EventType": "Reboot"}, {"EventType": "Terminate", "NotBefore": ""}]}', GRACE_SECONDS),
    ],
)
def test_what_clouds_say(answer, left):
    assert seconds_left(answer, NOW) == left


@pytest.mark.parametrize("answer", ["<html>log in</html>", '{"action": "reboot"}', "[1]", "7", '"TRUE"', "{"])
def test_what_is_no_notice(answer):
    """A portal's page, or another document, has no replica leave."""
    with pytest.raises(NoNotice, match="is no notice of AWS, GCP or Azure"):
        seconds_left(answer, NOW)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("10", 10.0),
        (" 2.5\n", 2.5),
        ("-3", 0.0),
        ("nan", 0.0),
        ("1e9", 86_400.0),
        ("", GRACE_SECONDS),
        ("going down", GRACE_SECONDS),
        ("2027-01-15T08:01:00+00:00", 60.0),
    ],
)
def test_a_file_is_a_notice_whatever_it_says(text, left):
    assert seconds_of_file(text, NOW) == left


class Metadata:
    """A metadata service on loopback. `gives`: what it answers, one after the other, the last for ever;
    `token`: without it answers nothing."""

    def __init__(self, *gives: tuple[int, str], token: str = "") -> None:
        self.gives, self.token, self.asked = list(gives), token, list[dict[str, str]]()

    async def get(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.headers))
        if self.token and request.headers.get("X-aws-ec2-metadata-token") != self.token:
            return web.Response(status=401)
        status, text = self.gives[0] if len(self.gives) == 1 else self.gives.pop(0)
        headers = {"Location": "http://127.0.0.1:1/"} if status == 302 else {}
        return web.Response(status=status, text=text, headers=headers)

    async def put(self, request: web.Request) -> web.Response:
        assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        return web.Response(text=self.token)

    async def notice(self) -> float:
        """What `noticed` makes of it."""
        app = web.Application()
        app.router.add_get("/notice", self.get)
        app.router.add_put("/latest/api/token", self.put)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await asyncio.wait_for(noticed(f"http://127.0.0.1:{port}/notice"), 20)
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(preemption, "LOOK_SECONDS", 0.02)


def test_a_service_is_asked_until_it_gives_notice(caplog):
    """Each cloud's header is there; errors, redirects and other documents are warned of once, and waited
    out."""
    answers = [(404, ""), (500, "oh"), (302, ""), (200, "<html>"), (200, "FALSE"), (200, "TRUE")]
    service = Metadata(*answers)
    assert asyncio.run(service.notice()) == GRACE_SECONDS
    assert len(service.asked) == len(answers)
    assert all((h["Metadata-Flavor"], h["Metadata"]) == ("Google", "true") for h in service.asked)
    assert sum("gives no notice" in record.message for record in caplog.records) == 1


def test_aws_wants_a_token():
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 100))
    service = Metadata((404, ""), (200, f'{{"action": "terminate", "time": "{end}"}}'), token="secret")
    assert 90 < asyncio.run(service.notice()) <= 100


def test_a_service_that_is_not_there_is_waited_for(caplog):
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(noticed("http://127.0.0.1:1/notice"), 0.3)

    asyncio.run(wait())
    assert sum("gives no notice" in record.message for record in caplog.records) == 1


def test_a_file_that_appears(tmp_path):
    async def wait() -> float:
        waiting = asyncio.create_task(noticed(str(tmp_path / "notice")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        (tmp_path / "notice").write_text("12\n")
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(wait()) == 12.0
