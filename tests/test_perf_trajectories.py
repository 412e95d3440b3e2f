"""The measurements on recorded agents, run on a tiny model: what they leave aside, and that they say why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.perf import auto_drop, quality
from tests.server import load_tiny

JSON = dict[str, Any]
SHORT, LONG = "ok", "1 failed, 2 passed. " * 30


def calling(i: int) -> JSON:
    call = {"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return {"role": "assistant", "content": f"step {i}", "tool_calls": [call]}


def agent(*observations: str, num_last: int = 0) -> list[JSON]:
    """An answer before each of these observations, and so many behind them."""
    messages: list[JSON] = [{"role": "system", "content": "You run tests."}, {"role": "user", "content": "Fix it."}]
    for i, text in enumerate(observations):
        messages += [calling(i), {"role": "tool", "tool_call_id": f"c{i}", "content": text}]
    return messages + [{"role": "assistant", "content": "done"}] * num_last


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    loaded = load_tiny(tmp_path, max_position_embeddings=4096)
    monkeypatch.setattr("akv_server.loader.load", lambda *_, **__: loaded)
    return tmp_path / "agents"


def run(main: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **agents: list[JSON]) -> int:
    """The exit status of a measurement of these agents."""
    folder.mkdir(exist_ok=True)
    for name, messages in agents.items():
        (folder / f"{name}.json").write_text(json.dumps({"messages": messages}))
    monkeypatch.setattr(sys, "argv", ["measure", "--trajectories", str(folder), *options])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("main", [quality.main, auto_drop.main])
def test_what_cannot_be_measured_is_said(
    main: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, folder, monkeypatch) == 2
    assert f"there are none in {folder}" in capsys.readouterr().err
    few = agent(LONG, LONG, LONG)
    assert run(main, folder, monkeypatch, "--only", "fiv", few=few, five=agent(*[SHORT] * 5)) == 2
    assert f"--only fiv: {folder} has few, five" in capsys.readouterr().err
    assert run(main, folder, monkeypatch, "--only", "few", "--max-tokens", "1500") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "few: skipped, 3 of its answers end within 1,500 tokens, at least 4 are needed" in said


def test_a_run_in_which_nothing_goes_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remark = "no turn has more than 2 observations before it"
    assert run(quality.main, folder, monkeypatch, few=agent(LONG, LONG, num_last=4)) == 0
    assert f"few: {remark}" in " ".join(capsys.readouterr().out.split())
    assert len({line.split("|")[2] for line in Path("out/quality.md").read_text().splitlines()[2:]}) == 1
    assert run(quality.main, folder, monkeypatch, few=agent(LONG, LONG, LONG, num_last=4)) == 0
    assert remark not in " ".join(capsys.readouterr().out.split())


def test_needles_are_planted_inside_the_tags_of_a_short_observation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [*agent(num_last=8), *agent(LONG, num_last=1)[2:]]
    assert run(auto_drop.main, folder, monkeypatch, short=agent(*[SHORT] * 6), late=late) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "late: skipped, its first half has no observation to plant a needle in" in said
    (row, *_) = json.loads(Path("out/auto-drop.json").read_text())
    assert (row["asked_once"], row["asked_on_end"]) == (2, 4)
    messages = [{"role": "user", "content": f'<ephemeral_observation id="obs-1">{SHORT}</ephemeral_observation>'}]
    content = auto_drop.planted(messages, [0, 0, 0])[0]["content"]
    assert content.startswith('<ephemeral_observation id="obs-1">') and content.endswith("</ephemeral_observation>")
    assert content.count("Note: the") == 3
