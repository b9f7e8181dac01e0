"""The server of the pages, without a browser."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.view.server import STATIC, make_app
from tests.rlhf_pipeline.report.conftest import write_run

BASE = "http://127.0.0.1:4321"


def client_of(*folders: Path, key: str | None = "secret") -> TestClient:
    """Return a client that has exchanged the key."""
    app = make_app([View(folder) for folder in folders], port=4321, key="secret")
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    if key is not None:
        client.get("/", params={"key": key})
    return client


def test_the_key_is_needed(run_dir: Path):
    """Without the key's cookie nothing is answered; the cookie is no script's, and the address loses the key."""
    stranger = client_of(run_dir, key=None)
    assert [stranger.get(path).status_code for path in ("/", "/api/runs", "/static/app.js", "/?key=wrong")] == [403] * 4
    reply = stranger.get("/?key=secret")
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secret" not in cookie
    assert stranger.get("/api/runs").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:1"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:4321"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_foreign_requests_are_refused(run_dir: Path, headers: dict[str, str]):
    """Another Host, another Origin and requests of other sites' pages get nothing, though they have the cookie."""
    client = client_of(run_dir)
    assert client.get("/api/runs", headers=headers).status_code == 403
    own = {"origin": BASE, "sec-fetch-site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200


def test_only_named_files_are_served(run_dir: Path):
    """No path leads out of the pages, nothing is listed, and nothing can be written."""
    client = client_of(run_dir)
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/vendor/lit-html.js",
        "/static/",
        "/static/VENDORED",
        "/static/index.html",
        "/etc/passwd",
        "//etc/passwd",
        "/api/../server.py",
    ):
        assert client.get(path).status_code == 404, path
    assert [client.post(path).status_code for path in ("/", "/api/runs")] == [405, 405]
    assert client.get("/static/app.js").headers["content-type"].startswith("text/javascript")


def test_the_page_allows_its_own_scripts_only(run_dir: Path):
    """The policy has a nonce of this answer, no inline styles, and no frame may hold the page."""
    client = client_of(run_dir)
    first, second = client.get("/"), client.get("/")
    policy = first.headers["content-security-policy"]
    nonce = re.search(r"'nonce-([^']+)'", policy)
    assert nonce
    assert f'nonce="{nonce[1]}"' in first.text
    assert nonce[1] not in second.text
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert first.headers["x-content-type-options"] == "nosniff"


def test_answers_and_their_errors(run_dir: Path):
    """Every question of the pages is answered; what is not there is 404, what cannot be read 400."""
    client = client_of(run_dir, write_run(run_dir.parent / "other", num_rollouts=2))
    assert [run["name"] for run in client.get("/api/runs").json()] == ["demo", "other"]
    for path in (
        "metrics",
        "facets",
        "stats",
        "health",
        "definition",
        "changes",
        "evaluations",
        "trajectories/1",
        "groups/1",
        "steps/1",
    ):
        assert client.get(f"/api/runs/0/{path}").status_code == 200, path
    rows = client.get("/api/runs/0/trajectories?where=reward>=0.5&sort=-reward&limit=3").json()["rows"]
    assert len(rows) == 3
    assert all(row["reward"] >= 0.5 for row in rows)
    for path in (
        "runs/7/metrics",
        "runs/0/trajectories/999999",
        "runs/0/groups/x",
        "runs/0/steps/99",
        "runs/0~x/facets",
        "",
    ):
        assert client.get(f"/api/{path}").status_code == 404, path
    for query in ("where=colour==1", "where=reward", "offset=-1", "limit=x"):
        reply = client.get(f"/api/runs/0/trajectories?{query}")
        assert (reply.status_code, list(reply.json())) == (400, ["error"]), query


def test_vendored_files_are_the_recorded_ones():
    """The files of other projects have the recorded checksums, and each project's license is beside them."""
    vendor = STATIC / "vendor"
    lines = [line.split() for line in (vendor / "VENDORED").read_text().splitlines() if not line.startswith("#")]
    for _, _, name, digest in lines:
        assert hashlib.sha256((vendor / Path(name).name).read_bytes()).hexdigest() == digest
    assert {Path(line[2]).name for line in lines} == {p.name for p in vendor.iterdir()} - {
        "VENDORED",
        "lit-html.LICENSE",
        "uPlot.LICENSE",
    }


def test_pages_make_text_nodes_only():
    """No script of ours makes markup of text, or code of it."""
    for path in STATIC.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|unsafeHTML|\beval\(|new Function|document\.write", path.read_text()
        )


def test_the_pages_stay_small():
    """At most 1000 lines of scripts and 200 of style."""
    assert sum(len(path.read_text().splitlines()) for path in STATIC.glob("*.js")) <= 1000
    assert len((STATIC / "style.css").read_text().splitlines()) <= 200


def test_json_of_text_that_is_no_text(run_dir: Path):
    """Answers are JSON whatever is stored: no NaN."""
    reply = client_of(write_run(run_dir.parent / "failing", failed=4)).get("/api/runs/0/trajectories?limit=500")
    assert [row["reward"] for row in json.loads(reply.text)["rows"][-4:]] == [None] * 4


def test_a_run_that_cannot_be_read_hides_no_other(run_dir: Path):
    """It is in the list with the reason, and the others are answered."""
    broken = write_run(run_dir.parent / "broken", num_rollouts=1)
    (broken / "metrics.jsonl").write_text("not JSON\n")
    client = client_of(run_dir, broken)
    first, second = client.get("/api/runs").json()
    assert first["stored"] == 48
    assert "metrics.jsonl" in second["error"]
    assert client.get("/api/runs/0/facets").status_code == 200


def test_an_export_is_what_the_filter_finds(run_dir: Path):
    """As JSONL and as Parquet, by conditions and by a search; a kind that is not known is refused."""
    client = client_of(run_dir)
    wanted = client.get("/api/runs/0/trajectories?where=reward>=0.5&text=1&limit=500").json()
    lines = client.get("/export/0.jsonl?where=reward>=0.5&text=1").text.splitlines()
    assert len(lines) == wanted["matched"] > 0
    assert {json.loads(line)["completion"] for line in lines} == {row["completion"] for row in wanted["rows"]}
    pytest.importorskip("pyarrow")
    reply = client.get("/export/0.parquet")
    assert (reply.status_code, reply.content[:4]) == (200, b"PAR1")
    assert client.get("/export/0.csv").status_code == 404
    assert client.get("/export/0.jsonl?where=colour==1").status_code == 400
