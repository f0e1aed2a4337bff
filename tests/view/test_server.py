"""The server's doors: loopback and a token, a policy that lets no other script run, JSON of every run."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from verl.view import command
from verl.view.page import View
from verl.view.runs import Run
from verl.view.server import application


@pytest.fixture
def ask(run_folders):
    """Return a function that gets paths of one server, in turn, with the cookie of its token."""

    def get(*paths, token="right", headers=None):
        async def all_of_them():
            view = View([Run(folder, folder.name) for folder in run_folders])
            async with TestClient(TestServer(application(view, "right"))) as client:
                if token:
                    await client.get(f"/?token={token}")
                answers = []
                for path in paths:
                    answer = await client.get(path, headers=headers)
                    answers.append((answer.status, await answer.text(), answer.headers))
                return answers

        return asyncio.run(all_of_them())

    return get


def test_without_its_token_nothing_is_answered(ask):
    paths = ("/", "/static/page.js", "/api/state", "/api/sample?run=0&number=0", "/nowhere")
    for token in ("", "wrong"):
        for status, text, headers in ask(*paths, token=token):
            assert status == 403 and "token" in text and "critic" not in text
            assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_a_page_elsewhere_cannot_come_in_by_a_name_of_its_own(ask):
    for host in ("evil.example:7860", "127.0.0.1.evil.example", "localhost.evil:80"):
        [(status, text, _)] = ask("/api/state", headers={"Host": host})
        assert status == 421 and "loopback" in text


def test_the_page_loads_its_own_scripts_only(ask):
    [(status, text, headers)] = ask("/")
    assert status == 200 and 'src="/static/page.js"' in text and "http:" not in text and "https:" not in text
    policy = headers["Content-Security-Policy"]
    assert "script-src 'self';" in policy and "unsafe-eval" not in policy and "default-src 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_no_file_but_the_pages_own_is_served(ask):
    paths = ("/static/../server.py", "/static/%2e%2e/server.py", "/static/config.yaml", "/static/", "/config.yaml")
    assert {status for status, _, _ in ask(*paths)} == {404}
    assert [status for status, _, _ in ask("/static/page.css", "/static/page.js", "/static/samples.js")] == [200] * 3


def test_of_a_run_only_the_traces_that_are_listed_can_be_saved(ask, run_folders):
    folder = run_folders[0] / "profile" / "step_2"
    folder.mkdir(parents=True)
    (folder / "actor-rank0.json.gz").write_bytes(b"trace")
    (folder / "link.json.gz").symlink_to(run_folders[0] / "config.yaml")
    names = ("profile/step_2/actor-rank0.json.gz", "profile/step_2/link.json.gz", "config.yaml", "../x.json.gz")
    first, *others = ask(*(f"/api/file?run=0&name={name}" for name in names), "/api/file?run=9&name=x", "/api/state")
    assert first[:2] == (200, "trace") and "attachment" in first[2]["Content-Disposition"]
    state = json.loads(others.pop()[1])
    assert state["runs"][0]["files"] == [names[0]]
    assert [status for status, _, _ in others] == [404] * 4


def test_runs_curves_options_and_samples_are_answered_as_json(ask):
    answers = ask(
        "/api/state",
        "/api/curves?name=critic/score/mean&name=no/such",
        "/api/config",
        "/api/samples?run=1&first=0",
        "/api/search?run=1&text=guess%203",
    )
    state, curves, config, samples, found = (json.loads(text) for _, text, _ in answers)
    assert [run["name"] for run in state["runs"]] == ["one", "two"]
    assert [chart["title"] for chart in state["charts"]][:2] == ["Reward", "Validation"]
    assert [own["critic/score/mean"][1][0] for own in curves] == [0.5, 0.2] and "no/such" not in curves[0]
    assert config["differences"] == [["actor_rollout_ref.actor.optim.lr", [0.001, 0.01]]]
    assert samples["count"] == 21 and samples["complete"] is True and len(found) == 3
    one, two = ask("/api/samples?run=0&first=0", "/api/sample?run=0&number=0")
    assert json.loads(two[1])["turns"] and json.loads(one[1])["columns"]["step"][0] == json.loads(two[1])["step"]


def test_a_number_that_is_none_is_refused(ask):
    answers = ask("/api/samples?run=7", "/api/sample?run=0&number=99", "/api/sample?run=x", "/api/samples?run=-1")
    assert [status for status, _, _ in answers] == [400, 404, 400, 400]


def test_not_a_number_is_json_all_the_same(ask, run_folders):
    from tests.view.conftest import sample, write_lines

    write_lines(run_folders[0] / "samples" / "9.jsonl", [sample(9, "u", "p", "x", float("nan"), reward=float("inf"))])
    rows, _ = ask("/api/samples?run=0", "/api/state")
    assert "NaN" not in rows[1] and json.loads(rows[1])["columns"]["score"].count(None) == 1
    _, whole = ask("/api/samples?run=0", "/api/sample?run=0&number=3")
    assert json.loads(whole[1], parse_constant=pytest.fail)


def test_only_loopback_is_served(run_folder, capsys):
    with pytest.raises(SystemExit):
        command.main([str(run_folder), "--host", "0.0.0.0"])
    assert "loopback only" in capsys.readouterr().err
    assert command.main([str(run_folder / "nowhere")]) == 1


def test_a_taken_port_is_said(run_folder, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert command.main([str(run_folder), "--port", str(taken.getsockname()[1])]) == 1
    assert "Name another one" in capsys.readouterr().err
