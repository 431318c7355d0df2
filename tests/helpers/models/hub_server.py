"""A server on loopback that answers `huggingface_hub` as the Hugging Face hub does, for one model, and
counts.

Its answers (paths, headers, error codes) are those that the client's source reads: a revision's commit and
files, a commit's tree, and the files themselves with ETag, X-Repo-Commit and ranges.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPO = "acme/sums"


class Hub:
    """A context manager. Commits have files, branches name commits; the switches change how it answers."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.push(files)
        self.token = ""  # who asks must bring it
        self.gated = False
        self.cut_after: int | None = None  # bytes of a weights file, after which the connection breaks
        self.seconds_per_part = 0.0  # of a weights file, each a sixteenth of it
        self.hurry = threading.Event()  # from when on no part takes time
        self.gets: Counter[str] = Counter()  # file bodies that were asked for
        self.requests = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit, at which `branch` now points."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode() + branch.encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        return commit

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that a test has ended is no error of the server's."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            hub.requests += 1
            path = unquote(urlsplit(self.path).path)
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._refuse(401, "RepoNotFound")
            if hub.gated:
                return self._refuse(403, "GatedRepo")
            if found := re.fullmatch(rf"/api/models/{REPO}(?:/revision/(.+))?", path):
                return self._info(found[1] or "main")
            if found := re.fullmatch(rf"/api/models/{REPO}/tree/([^/]+)", path):
                return self._tree(found[1])
            if found := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
                return self._file(found[1], found[2], body)
            return self._refuse(404 if path.startswith("/api/") else 401, "RepoNotFound")

        def _commit(self, revision: str) -> str | None:
            commit = hub.branches.get(revision, revision)
            return commit if commit in hub.commits else None

        def _info(self, revision: str) -> None:
            commit = self._commit(revision)
            if commit is None:
                return self._refuse(404, "RevisionNotFound")
            siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.commits[commit].items()]
            return self._json(
                {
                    "id": REPO,
                    "modelId": REPO,
                    "sha": commit,
                    "siblings": siblings,
                    "tags": [],
                    "private": False,
                }
            )

        def _tree(self, revision: str) -> None:
            commit = self._commit(revision)
            if commit is None:
                return self._refuse(404, "RevisionNotFound")
            files = hub.commits[commit].items()
            return self._json(
                [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files
                ]
            )

        def _file(self, revision: str, name: str, body: bool) -> None:
            commit = self._commit(revision)
            if commit is None:
                return self._refuse(404, "RevisionNotFound")
            data = hub.commits[commit].get(name)
            if data is None:
                return self._refuse(404, "EntryNotFound", commit)
            first = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
            self.send_response(206 if first else 200)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            if not body:
                return
            hub.gets[name] += 1
            if hub.cut_after is not None and name.endswith(".safetensors"):
                self.wfile.write(data[first : hub.cut_after])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            part = len(data) // 16 + 1 if name.endswith(".safetensors") else len(data) + 1
            for start in range(first, len(data), part):
                hub.hurry.wait(hub.seconds_per_part)
                self.wfile.write(data[start : start + part])

        def _json(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _refuse(self, status: int, code: str, commit: str = "") -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":  # for trials by hand: python hub_server.py FOLDER [SECONDS_PER_PART]
    import sys

    with Hub(files_of(Path(sys.argv[1]))) as served:
        served.seconds_per_part = float(sys.argv[2]) if sys.argv[2:] else 0.0
        print(served.url, served.branches, flush=True)
        threading.Event().wait()
