"""``verl report``: one file with all in it, in which text of a model is data, and no script runs but its own."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest

from verl.view import page as pages
from verl.view.command import report


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes


@pytest.fixture
def without_charts(monkeypatch):
    monkeypatch.setattr(pages, "plotly_script", lambda: None)
    monkeypatch.setattr("verl.view.command.plotly_script", lambda: None)


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_report_is_one_file_with_runs_curves_options_and_samples(run_folders, capsys, without_charts):
    assert report([*map(str, run_folders), "--samples", "12"]) == 0
    shown = capsys.readouterr()
    assert "report.html: 2 runs" in shown.out and "pip install" in shown.err
    data = data_of((run_folders[0] / "report.html").read_text())
    assert [run["name"] for run in data["state"]["runs"]] == ["one", "two"]
    assert data["curves"][1]["critic/score/mean"][1][0] == 0.2
    assert data["config"]["differences"][0][0] == "actor_rollout_ref.actor.optim.lr"
    for own in data["samples"]:
        assert len(own["whole"]) == len(own["columns"]["step"]) == own["count"] > 4
        assert [t["step"] for t in own["whole"]] == own["columns"]["step"]


def test_what_a_model_wrote_is_data_and_no_markup(run_folder, without_charts):
    assert report([str(run_folder)]) == 0
    text = (run_folder / "report.html").read_text()
    assert "window.evil" in text and "<img" not in text and text.count("</script>") == 2
    assert Tags(text).tags.count("script") == 2 and text.isascii()
    assert not {name for name, _ in Tags(text).attributes} & {"src", "onerror", "onload", "onclick"}


def test_only_the_scripts_inside_may_run(run_folder):
    pytest.importorskip("plotly")
    assert report([str(run_folder), "-o", str(run_folder / "x.html")]) == 0
    text = (run_folder / "x.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    codes = [script.encode(), pages.plotly_script().read_bytes()]
    hashes = [f"'sha256-{b64encode(sha256(code).digest()).decode()}'" for code in codes]
    assert policy.startswith("default-src 'none';") and policy.endswith(f"script-src {' '.join(hashes)}")
    assert len(text) < 3 * 2**20


def test_a_file_that_cannot_be_written_is_said(run_folder, capsys, without_charts):
    assert report([str(run_folder), "-o", str(run_folder / "no" / "x.html")]) == 1
    assert "Name another file with --output" in capsys.readouterr().err
