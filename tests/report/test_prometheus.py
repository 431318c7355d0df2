"""`observability.prometheus`: what a scrape gives of a run, who gets it, and the dashboard that shows it."""

import io
import json
import math
import os
import re
import signal
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, redirect_stderr
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from helpers import synthetic
from helpers.paths import ROOT
from helpers.processes import free_port
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch import cli
from laminar_hpc.line.messages.data import ReplicaLoad
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.prometheus import check_prometheus, prometheus
from laminar_hpc.report.prometheus import server
from laminar_hpc.report.prometheus.families import REPLICAS_SHOWN, RunCollector
from laminar_hpc.report.prometheus.gauges import GAUGES
from laminar_hpc.report.prometheus.server import dashboard
from laminar_hpc.report.prometheus.totals import COUNTERS, HISTOGRAMS
from laminar_hpc.store import status
from laminar_hpc.store.status import Queues, RankStatus, Status

PROMPT, SECRET = "what is 1+1? answer:", "s3cret-of-the-run"


def now_status(replicas: int = 2) -> Status:
    """Replica 1 is not heard for a while, the others decode; texts that no scrape may give. However slow this
    machine is, the status is fresh for a minute."""
    now = time.time() + 60.0
    ranks = [RankStatus("trainer", 0, 11, SECRET, now, 8, 8), RankStatus("relay", 0, 12, SECRET, now, 8, 8)]
    for index in range(replicas):
        load = ReplicaLoad("draining", 7, 40, 3, running=32, queued=8, kv_tokens=300, kv_capacity=400)
        ranks.append(RankStatus("rollout", index, 13, SECRET, now - 6 * (index == 1), 7, 7, load))
    return Status(now, 10, SECRET, 3, 60, PROMPT, 8, ranks, Queues(5, 2, 4, 1, 1, PROMPT))


def going(run_dir: Path, replicas: int = 2) -> synthetic.Written:
    """A run that goes on, with every record that a metric is made of."""
    written = synthetic.write(run_dir, steps=3, start=time.time() - 5, crash=True)
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")
    now = time.time()
    move = {"trajectory_id": 5, "destination": 1, "weight_id": 7, "tokens": 90, "prefix_tokens": 64}
    for record in (
        {"kind": "move", **move, "source": 0, "seconds": 0.25},
        {"kind": "move", **move, "source": None, "seconds": 40.0, "loaded": True},
        {"kind": "move_off", "trajectory_id": 5, "source": 0, "destination": 1, "reason": PROMPT},
        {"kind": "publish", "weight_id": 9, "step": 9, "stall_seconds": 0.02, "seconds": 2.0, "bytes": 100}
        | {"bytes_over_full": 0.1, "changed_fraction": 0.04},
        {"kind": "logprob_mismatch", "replica": "rollout0", "mean": 1e-6, "max": 1e-5, "limit": 1e-3},
        {"kind": "logprob_mismatch", "replica": "rollout9", "mean": 1.0, "max": 1.0, "limit": 1e-3},
        {"kind": "checkpoint", "step": 3, "path": SECRET, "seconds": 1.5, "stalled": None},
        {"kind": "reward_error", "text": PROMPT},
    ):
        metrics.write({"time": now, **record})
    step = {**written.steps[-1], "step": 4, "time": now, "reward_mean/style": 0.5, "reward_error_count": 2}
    metrics.write(step)
    metrics.close()
    written.steps.append(step)
    status.write(run_dir, now_status(replicas))
    return written


def text_of(collector: RunCollector, write=generate_latest) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return write(registry).decode()


def samples(text: str) -> dict[tuple, float]:
    """(name, labels but for `run`, sorted) -> value."""
    return {
        (s.name, *sorted((k, v) for k, v in s.labels.items() if k != "run")): s.value
        for family in parse(text)
        for s in family.samples
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "sums"


def test_figures_are_those_of_the_files(run_dir: Path) -> None:
    """Counters are sums over the records, histograms hold each of them, gauges are the newest."""
    written = going(run_dir)
    found = samples(text_of(RunCollector(run_dir)))
    for name, field in (
        ("trajectories_trained", "trajectories"),
        ("response_tokens_trained", "response_tokens"),
        ("trainer_wait_seconds", "wait_seconds"),
        ("reward_errors", "reward_error_count"),
    ):
        total = sum(step.get(field) or 0 for step in written.steps)
        assert found[f"laminar_{name}_total",] == pytest.approx(total) and total > 0
    assert found["laminar_steps_done_total",] == 4 and found["laminar_steps",] == 4
    assert found["laminar_step_reward_mean",] == written.steps[-1]["reward_mean"]
    assert found["laminar_step_reward_errors",] == 2
    assert found["laminar_step_reward_function_mean", ("function", "style")] == 0.5
    assert found["laminar_run_state", ("state", "going on")] == 1
    assert sum(v for key, v in found.items() if key[0] == "laminar_run_state") == 1
    moved = {
        bound: found["laminar_move_seconds_bucket", ("le", bound)]
        for bound in ("0.1", "0.3", "30.0", "100.0")
    }
    assert moved == {"0.1": 0, "0.3": 1, "30.0": 1, "100.0": 2}
    assert found["laminar_move_seconds_count",] == 2 and found["laminar_move_seconds_sum",] == 40.25
    assert found["laminar_trajectories_rescued_total",] == 1 and found["laminar_tokens_moved_total",] == 180
    assert found["laminar_checkpoint_seconds_count",] == 1
    assert found["laminar_checkpoint_stalled_seconds_count",] == 0, "null is no observation"
    assert found["laminar_publish_changed_fraction",] == 0.04


def test_replicas_and_queues_are_those_of_the_status(run_dir: Path) -> None:
    """One that is not heard is silent; mismatches are those of replicas that are in the run."""
    going(run_dir)
    found = samples(text_of(RunCollector(run_dir)))
    assert (
        found["laminar_replicas", ("state", "draining")]
        == 1
        == found["laminar_replicas", ("state", "silent")]
    )
    assert found["laminar_replica_state", ("replica", "1"), ("state", "silent")] == 1
    assert (
        found["laminar_rollout_running",] == 64 and found["laminar_replica_running", ("replica", "1")] == 32
    )
    assert found["laminar_groups_ready",] == 2 and found["laminar_trainer_waits",] == 1
    assert found["laminar_ranks", ("role", "rollout")] == 2
    mismatches = [key for key in found if key[0] == "laminar_logprob_mismatch_mean"]
    assert mismatches == [("laminar_logprob_mismatch_mean", ("replica", "0"))]


def test_scrapes_are_as_prometheus_demands(run_dir: Path) -> None:
    """What promtool looks at: help for each, counters and only they end with _total, endings of histograms
    are theirs, base units, no type or abbreviation in a name. Both formats can be parsed."""
    going(run_dir)
    collector = RunCollector(run_dir)
    families = list(parse(text_of(collector)))
    assert len(families) > 80
    for family in families:
        name, base = family.name, family.name.removesuffix("_total")
        assert re.fullmatch(r"laminar_[a-z][a-z0-9_]*[a-z0-9]", name) and family.documentation.endswith(".")
        parts = base.split("_")
        assert not {"ms", "sec", "s", "kb", "mb", "gb", "minutes", "hours", "gauge", "counter"} & set(parts)
        assert family.type in ("gauge", "counter", "histogram")
        if family.type == "gauge":
            assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert ("seconds" in parts) <= (parts[-1] == "seconds" or family.type == "counter"), name
        for sample in family.samples:
            assert sample.labels["run"] == "sums" and math.isfinite(sample.value)
            assert family.type != "counter" or sample.name.endswith("_total")
    strict = {family.name for family in parse_openmetrics(text_of(collector, openmetrics))}
    assert {name.removesuffix("_info") for name in strict} == {
        family.name.removesuffix("_info") for family in families
    }


def test_nothing_but_figures_is_given(run_dir: Path) -> None:
    """Neither prompts, errors' texts, hosts, paths nor keys are in a scrape."""
    going(run_dir)
    text = text_of(RunCollector(run_dir))
    assert PROMPT not in text and SECRET not in text and str(run_dir.parent) not in text


def test_a_thousand_replicas_are_bounded(run_dir: Path) -> None:
    """Series of replicas are those of REPLICAS_SHOWN; the sums are of all."""
    going(run_dir, replicas=1000)
    found = samples(text_of(RunCollector(run_dir)))
    named = {dict(key[1:])["replica"] for key in found if "replica" in dict(key[1:])}
    assert named == {str(index) for index in range(REPLICAS_SHOWN)}
    assert (
        found["laminar_rollout_running",] == 32_000
        and found["laminar_replicas", ("state", "draining")] == 999
    )
    assert len(found) < 400 + 10 * REPLICAS_SHOWN


def test_counters_never_go_back(run_dir: Path, tmp_path: Path) -> None:
    """Over a resume they go on, steps that are done again included; before the first record there is no
    step, and a scrape all the same."""
    collector = RunCollector(run_dir)
    assert samples(text_of(collector))["laminar_run_state", ("state", "starting")] == 1
    synthetic.write(run_dir, steps=7, crash=True, start=time.time() - 900)
    before = samples(text_of(collector))
    assert before["laminar_steps",] == 7 and before["laminar_run_state", ("state", "died")] == 1
    synthetic.write(run_dir, steps=6, start_step=4, seed=1, start=time.time() - 2, crash=True)
    collector._looked = 0.0
    after = samples(text_of(collector))
    assert after["laminar_steps",] == 6 and after["laminar_steps_done_total",] == 9
    assert after["laminar_launches_total",] == 2
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith(("_total", "_count")))


# ---- listening ---------------------------------------------------------------------------------------------


def config_of(run_dir: Path, address: str, key: str = "") -> RunConfig:
    config = RunConfig(run_dir=str(run_dir))
    config.observability.prometheus = address
    config.observability.prometheus_key = key
    return config


def get(port: int, path: str = "/metrics", key: str = "") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_scrape_by_http(run_dir: Path) -> None:
    """On loopback anybody of the machine gets the figures and the dashboard, whoever else holds connections
    open; a signal to the run's processes does not end it, the end of the controller does."""
    going(run_dir)
    (run_dir / "logs").mkdir()
    said, port = list[str](), free_port()
    with prometheus(config_of(run_dir, str(port)), said.append):
        assert said == [f"metrics      http://127.0.0.1:{port}/metrics"]
        code, body = get(port)
        assert code == 200 and b"laminar_steps_done_total" in body
        with closing(socket.create_connection(("127.0.0.1", port))):
            (process,) = listeners(port)
            os.kill(process, signal.SIGTERM)
            assert get(port)[0] == 200
        assert json.loads(get(port, "/grafana.json")[1])["title"] == "laminar_hpc"
        assert get(port, "/config.yaml")[0] == 404 and get(port, "/../config.yaml")[0] == 404
        with pytest.raises(LaminarError, match=f"observability.prometheus=127.0.0.1:{port} cannot be used"):
            check_prometheus(config_of(run_dir, str(port)))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    assert (run_dir / "logs" / "prometheus.log").read_text() == ""


def test_a_run_under_way_goes_on_without(run_dir: Path) -> None:
    """A controller that takes over warns of a port that is taken, as by one that hangs; it ends no run."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        config, said = config_of(run_dir, str(other.getsockname()[1])), list[str]()
        with prometheus(config, said.append, under_way=True):
            assert len(said) == 1 and said[0].startswith("warning ") and "goes on without" in said[0]
        with pytest.raises(LaminarError, match="choose another"), prometheus(config, said.append):
            pass


def listeners(port: int) -> list[int]:
    """The processes that listen at a port of loopback."""
    found = psutil.Process().children()
    return [p.pid for p in found if any(c.laddr.port == port for c in p.net_connections())]


def test_silent_connections_are_closed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are taken at a time, without a word, keep nobody out for long; what goes wrong in a scrape
    is an answer without its text, and stands in the log once."""
    monkeypatch.setattr(server._Handler, "timeout", 0.5)
    going(run_dir)
    collector = RunCollector(run_dir)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with server.ScrapeServer(listener, server.app(collector, None)) as serving, ExitStack() as silent:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for _ in range(server._AT_ONCE):
            silent.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
        deadline = time.monotonic() + 20
        while not answers(port):
            assert time.monotonic() < deadline
        stderr = io.StringIO()
        monkeypatch.setattr(collector, "_look", lambda: 1 / 0)
        with redirect_stderr(stderr):
            codes = [get(port) for _ in range(2)]
        serving.shutdown()
        thread.join()
    assert all(code == 500 and body.startswith(b"ZeroDivisionError, see logs/") for code, body in codes)
    assert stderr.getvalue().count("Traceback") == 1


def answers(port: int) -> bool:
    try:
        return get(port)[0] == 200
    except OSError:
        return False


def test_beyond_loopback_a_key_is_wanted(run_dir: Path) -> None:
    """The run's own is made for its owner alone and kept; without it, or with another, nothing is said. It
    stands on no command line."""
    going(run_dir)
    (run_dir / "logs").mkdir()
    port, said, key_file = free_port(), list[str](), run_dir / "prometheus.key"
    for _ in range(2):
        with prometheus(config_of(run_dir, f"0.0.0.0:{port}"), said.append):
            key = key_file.read_text().strip()
            assert stat.S_IMODE(key_file.stat().st_mode) == 0o600 and len(key) == 64
            assert str(key_file) in said[-1] and key not in said[-1]
            for path in ("/metrics", "/grafana.json", "/other"):
                code, body = get(port, path)
                assert code == 401 and b"laminar_" not in body
                assert get(port, path, "x" * 64)[0] == 401
            assert get(port, key=key)[0] == 200
            (process,) = listeners(port)
            assert key.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
    assert key_file.read_text().strip() == key


def test_a_key_of_ones_own(run_dir: Path, tmp_path: Path) -> None:
    """Is wanted on loopback as well; one that is missing or that others can read is refused in a line."""
    key = tmp_path / "key"
    config = config_of(run_dir, str(free_port()), str(key))
    with pytest.raises(LaminarError, match=r"prometheus_key=\S+ is missing: make one"):
        check_prometheus(config)
    key.write_text("k" * 40)
    key.chmod(0o644)
    with pytest.raises(LaminarError, match="others may read it"):
        check_prometheus(config)
    key.chmod(0o600)
    check_prometheus(config)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("0", False), ("9400", False), ("0.0.0.0:9400", False), ("[::1]:9400", False), ("node-7:9400", False)]
    + [(text, True) for text in ("", "70000", "on", "-1", "1.2.3.4:0", ":9400", "::1:9400", "a b:9400")],
)
def test_addresses(text: str, wrong: bool) -> None:
    """What is no PORT or ADDRESS:PORT is refused by name."""
    said = [line for line in broken_rules(config_of(Path("runs/x"), text), None) if "prometheus" in line]
    assert bool(said) is wrong and all("ADDRESS:PORT such as" in line for line in said)


def test_a_taken_port_is_refused_before_anything_starts(run_dir: Path) -> None:
    """`laminar train` says it in one line, and there is no run directory."""
    words = ["experiment=demo", f"run_dir={run_dir}"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        words.append(f"observability.prometheus={other.getsockname()[1]}")
        with pytest.raises(LaminarError, match=r"\(Address already in use\): choose another") as error:
            cli.run(["train", *words])
    assert "\n" not in str(error.value) and not run_dir.exists()


# ---- what shows it -----------------------------------------------------------------------------------------


def names() -> set[str]:
    """All that is exported, but for the fields of a step; histograms without their endings."""
    counters = {f"laminar_{name}_total" for name in COUNTERS}
    return {"laminar_run_info", *counters, *(f"laminar_{name}" for name in [*GAUGES, *HISTOGRAMS])}


def test_every_query_of_the_dashboard_names_what_is_exported(run_dir: Path) -> None:
    """Each metric of each panel, and of the alerts of docs/observing.md, is in a scrape, or is a field of a
    step that docs/metrics.md explains; each query chooses the run, and each panel has a unit and a word on
    what it shows."""
    going(run_dir)
    exported = {key[0] for key in samples(text_of(RunCollector(run_dir)))}
    fields = re.search(r"### A step\n(.*?)\n## ", (ROOT / "docs/metrics.md").read_text(), re.S)
    steps = {f"laminar_step_{field}" for field in re.findall(r"`(\w+)`", fields[1])} if fields else set()
    page = json.loads(dashboard())
    panels = [panel for panel in page["panels"] if panel["type"] != "row"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"laminar_\w+", t["expr"])}
    asked |= set(re.findall(r"laminar_(?!hpc)\w+", (ROOT / "docs/observing.md").read_text()))
    assert len(asked) > 50 and asked <= exported | steps, asked - exported - steps
    for panel in panels:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            chosen = target["expr"].count('{run=~"$run",instance=~"$instance"}')
            assert chosen == len(re.findall(r"laminar_\w+", target["expr"]))
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
    places = [[p["gridPos"][k] for k in "xywh"] for p in page["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap"


def test_every_metric_is_explained() -> None:
    """docs/metrics.md names all of them, and none that is not exported."""
    page = (ROOT / "docs/metrics.md").read_text().partition("## Prometheus")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(laminar_\w+)`", page)) == names()
