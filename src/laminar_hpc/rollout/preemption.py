"""The notice that this machine will be taken back (cluster.preemption_notice): a file that appears, or what a
cloud's metadata service says, looked at once a second.

    a file      is there: with the seconds that are left in it, or the time of the end, or anything else
    AWS         404 until then; {"action": "terminate", "time": ...}, or a time alone
    GCP         FALSE until then; TRUE
    Azure       {"Events": [{"EventType": "Preempt", "NotBefore": ...}]} among other events

What is said of no time leaves GRACE_SECONDS, the least that these clouds give. A service that cannot be
reached, or says what is none of these, is warned of once and asked again.
"""

import asyncio
import contextlib
import email.utils
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

logger = logging.getLogger(__name__)
GRACE_SECONDS = 30.0
LOOK_SECONDS = 1.0
_ASK_SECONDS = 2.0  # for one answer
_ANSWER_BYTES = 1 << 16
_ENDS = {"terminate", "stop", "hibernate"}  # AWS, instance-action
_EVENTS = {"Preempt", "Terminate"}  # Azure, scheduled events
_TOKEN_PATH = "/latest/api/token"  # AWS, second version of its service
# each service wants its own, and ignores the others'
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}


class NoNotice(ValueError):
    """An answer that is none of those that are known."""


def seconds_left(answer: str, now: float) -> float | None:
    """Seconds from `now` (since the Unix epoch) until the machine goes, by a metadata service's answer; None
    while it is not to go. Raises NoNotice."""
    text = answer.strip()
    if text.upper() in ("", "FALSE", "NONE"):
        return None
    if text.upper() == "TRUE":
        return GRACE_SECONDS
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    if isinstance(said, dict) and isinstance(said.get("Events"), list):
        ends = [e for e in said["Events"] if isinstance(e, dict) and e.get("EventType") in _EVENTS]
        return min((_until(e.get("NotBefore"), now) for e in ends), default=None)
    if isinstance(said, dict) and said.get("action") in _ENDS:
        return _until(said.get("time"), now)
    if isinstance(said, str) and (then := _moment(said)) is not None:
        return max(0.0, then - now)
    raise NoNotice(f"{text[:80]!r} is no notice of AWS, GCP or Azure")


def seconds_of_file(text: str, now: float) -> float:
    """As `seconds_left`, of a file that is there, which is a notice whatever it says."""
    with contextlib.suppress(ValueError):
        return max(0.0, min(float(text), 86_400.0))
    try:
        left = seconds_left(text, now)
    except NoNotice:
        left = None
    return GRACE_SECONDS if left is None else left


def _until(then: object, now: float) -> float:
    moment = _moment(then) if isinstance(then, str) else None
    return GRACE_SECONDS if moment is None else max(0.0, moment - now)


def _moment(text: str) -> float | None:
    """Seconds since the Unix epoch, of an ISO 8601 time (AWS) or one as in mail (Azure); UTC without zone."""
    found: datetime | None = None
    with contextlib.suppress(ValueError):
        found = datetime.fromisoformat(text)
    with contextlib.suppress(ValueError):
        found = found or email.utils.parsedate_to_datetime(text)
    return None if found is None else (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


async def noticed(where: str) -> float:
    """Waits, without a limit, until the machine is to be taken back; returns the seconds that are left."""
    if not where.startswith(("http://", "https://")):
        return await _file(Path(where))
    timeout, warned = aiohttp.ClientTimeout(_ASK_SECONDS), False
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        while True:
            try:
                left = seconds_left(await _ask(session, where), time.time())
                if left is not None:
                    return left
            except (NoNotice, aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
                if not warned:
                    text = "cluster.preemption_notice: %s gives no notice (%s); it is asked again"
                    logger.warning(text, where, str(error) or type(error).__name__)
                warned = True
            await asyncio.sleep(LOOK_SECONDS)


async def _file(path: Path) -> float:
    while True:
        with contextlib.suppress(OSError):
            return seconds_of_file(path.read_text(errors="replace")[:_ANSWER_BYTES], time.time())
        await asyncio.sleep(LOOK_SECONDS)


async def _ask(session: aiohttp.ClientSession, where: str) -> str:
    """The service's answer; "" where it has none to give."""
    headers = dict(_HEADERS)
    for again in (True, False):
        async with session.get(where, headers=headers, allow_redirects=False) as reply:
            if reply.status == 404:
                return ""
            if reply.status == 401 and again:
                headers["X-aws-ec2-metadata-token"] = await _token(session, where)
                continue
            reply.raise_for_status()
            return (await reply.content.read(_ANSWER_BYTES)).decode()
    return ""


async def _token(session: aiohttp.ClientSession, where: str) -> str:
    """AWS answers nothing without one."""
    parts = urlsplit(where)
    wanted = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    url = f"{parts.scheme}://{parts.netloc}{_TOKEN_PATH}"
    async with session.put(url, headers=wanted, allow_redirects=False) as reply:
        reply.raise_for_status()
        return (await reply.content.read(_ANSWER_BYTES)).decode()
