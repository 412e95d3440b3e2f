"""Parts of the SWE-bench agent that need neither a server nor a repository: options, instances, actions, records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swe_bench_agent import instances
from swe_bench_agent.agent import Prices, parse_action, parse_policy
from swe_bench_agent.instances import Instance
from swe_bench_agent.main import main
from swe_bench_agent.records import Predictions

from akv_sdk import DropRepeats, InTurn, LastNObservations, RollingDrop, Usage


def test_options_that_make_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    senseless = (
        ["--policy", "some:3"],
        ["--only", "("],
        ["--max-cost", "1"],
        *(["--max-steps", text] for text in ("0", "-3", "1.5", "x", "9" * 5000)),
        *(["--max-tokens", text] for text in ("0", "-1")),
        *(["--max-seconds", text] for text in ("0", "-1", "nan", "inf", "1e300", "x")),
        *(["--command-timeout", text] for text in ("0", "-1", "nan")),
        *(["--max-cost", text, "--prices", "1", "1", "1"] for text in ("0", "-1", "nan")),
        *(["--prices", *texts] for texts in (("-1", "0", "0"), ("1", "nan", "1"), ("1", "1", "inf"))),
        *(["--temperature", text] for text in ("-0.1", "nan")),
    )
    for options in senseless:
        with pytest.raises(SystemExit) as ended:
            main(["--instances", "x.jsonl", "--out", str(tmp_path), *options])
        assert ended.value.code == 2
        assert options[0] in capsys.readouterr().err


def row(**changes: Any) -> dict[str, Any]:
    whole = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "f" * 40, "problem_statement": "It fails."}
    return {**whole, **changes}


def test_instances_come_from_lines_or_a_list(tmp_path: Path) -> None:
    rows = [row(), row(instance_id="a__b-2", problem_statement="two\u2028lines", patch="x")]
    (tmp_path / "i.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    (tmp_path / "i.json").write_text(json.dumps(rows))
    for name in ("i.jsonl", "i.json"):
        found = instances.load(str(tmp_path / name))
        assert found == [
            Instance("a__b-1", "a/b", "f" * 40, "It fails."),
            Instance("a__b-2", "a/b", "f" * 40, "two\u2028lines"),
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {"instance_id": "../../etc/x"},
        {"instance_id": ".."},
        {"instance_id": None},
        {"repo": "a/../b"},
        {"repo": "--upload-pack=x"},
        {"base_commit": "main"},
        {"base_commit": "--help"},
        {"problem_statement": 3},
    ],
)
def test_a_field_that_could_do_harm_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "i.jsonl").write_text(json.dumps(row()) + "\n" + json.dumps(row(**changes)))
    with pytest.raises(ValueError, match=f"entry 2: {next(iter(changes))}"):
        instances.load(str(tmp_path / "i.jsonl"))


def test_instances_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "twice.json").write_text(json.dumps([row(), row()]))
    with pytest.raises(ValueError, match="stands there twice"):
        instances.load(str(tmp_path / "twice.json"))
    with pytest.raises(ValueError, match="no such file"):
        instances.load(str(tmp_path / "none.jsonl"))
    (tmp_path / "torn.jsonl").write_text(json.dumps(row()) + '\n{"instance_id"')
    with pytest.raises(ValueError, match=r"torn\.jsonl: line 2: is no JSON"):
        instances.load(str(tmp_path / "torn.jsonl"))
    (tmp_path / "latin.json").write_bytes(b'["\xe4"]')
    with pytest.raises(ValueError, match=r"latin\.json: is no UTF-8"):
        instances.load(str(tmp_path / "latin.json"))
    (tmp_path / "torn.jsonl").write_text(json.dumps(row()) + "\n\n" + json.dumps(row())[:20])
    with pytest.raises(ValueError, match=r"torn\.jsonl: line 3: is no JSON"):
        instances.load(str(tmp_path / "torn.jsonl"))
    (tmp_path / "torn.json").write_text("[")
    with pytest.raises(ValueError, match=r"torn\.json: is no JSON"):
        instances.load(str(tmp_path / "torn.json"))
    (tmp_path / "latin.json").write_bytes(b"\xe4")
    with pytest.raises(ValueError, match=r"latin\.json: is no UTF-8"):
        instances.load(str(tmp_path / "latin.json"))


def test_a_hub_id_is_read_with_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(RuntimeError, match="pip install datasets"):
        instances.load("SWE-bench/SWE-bench_Lite")
    fake = ModuleType("datasets")
    fake.load_dataset = lambda name, split: [row(instance_id=f"{split}-1", repo=name)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (found,) = instances.load("SWE-bench/SWE-bench_Lite", split="dev")
    assert (found.instance_id, found.repo) == ("dev-1", "SWE-bench/SWE-bench_Lite")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("Look.\n\n```bash\nls -l\n```", "ls -l"),
        ("```sh\ncat <<'END'\na\n\nb\nEND\n```\nand then more", "cat <<'END'\na\n\nb\nEND"),
        ("```bash\nsubmit\n```", "submit"),
        ("no block: `ls`", None),
        ("```bash\nls\n```\n```bash\npwd\n```", None),
        ("```python\nprint()\n```", None),
        ("```bash\n\n```", None),
        ("```bash\nls", None),
        ("", None),
        # thoughts, of which the template may have opened the first
        ("<think>\n```bash\nrm -rf .\n```\n</think>\n```bash\nls\n```", "ls"),
        ("I could\n```bash\nrm -rf .\n```\nbut no.\n</think>\n\n```bash\nls\n```", "ls"),
        ("<think>\n```bash\nrm -rf .\n```\n</think>\nI am done.", None),
        ("<think>\nI could\n```bash\nrm -rf .\n```\n", None),
        ("Well. <think>\n</think> <think>\n```bash\nrm -rf .\n```\n", None),
        ("```bash\ngrep -rn '<think>' src\n```", "grep -rn '<think>' src"),
        # a block within the command
        (
            "So.\n```bash\ncat > a.md <<'END'\n```python\nprint()\n```\n\n``` json\n{}\n```\nEND\nls\n```\nThat is it.",
            "cat > a.md <<'END'\n```python\nprint()\n```\n\n``` json\n{}\n```\nEND\nls",
        ),
        ("```bash\ncat > a.md <<'END'\n```bash\nls\n```\nEND\n```", "cat > a.md <<'END'\n```bash\nls\n```\nEND"),
        ("```bash\ncat > a.md <<'END'\n```\nls\n```\nEND\n```", None),
        ("```bash\ncat > a.md <<'END'\n```\nls\nEND\n```", None),
        ("```bash\ncat > a.md <<'END'\n```python\nprint()\n```\nEND\n", None),
        ("````bash\ncat > a.md <<'END'\n```\nls\n```\nEND\n````", None),
        ("````bash\ncat > a.md <<'END'\n```sh\nls\n```\nEND\n````", "cat > a.md <<'END'\n```sh\nls\n```\nEND"),
        ("As in\n```python\nprint()\n```\nI look.\n```bash\nls\n```", "ls"),
        ("```bash\nls\n```\nwhich gives\n```\na.py\n```", None),
        ("```bash\ngrep -n '```' a.md\necho ```\n```", "grep -n '```' a.md\necho ```"),
        ("```bash\r\nls\r\n```\r\n", "ls"),
    ],
)
def test_an_action_is_one_block(text: str, command: str | None) -> None:
    assert parse_action(text) == command


def test_policies_by_their_flag() -> None:
    assert parse_policy("none") is None
    assert parse_policy("last:3") == LastNObservations(3)
    assert parse_policy("rolling:8000") == RollingDrop(8000)
    assert parse_policy("repeats+rolling:80") == InTurn(DropRepeats(), RollingDrop(80))
    for text in ("", "last", "last:x", "last:-1", "none+repeats", "repeats:1"):
        with pytest.raises(ValueError, match="is no policy"):
            parse_policy(text)


def test_prices_are_for_a_million_tokens_and_cached_ones_apart() -> None:
    usage = Usage.model_validate(
        {
            "prompt_tokens": 1_000_000,
            "completion_tokens": 100_000,
            "total_tokens": 1_100_000,
            "prompt_tokens_details": {"cached_tokens": 600_000},
        }
    )
    assert Prices(input=3, cached=0.5, output=10).cost_usd(usage) == pytest.approx(0.4 * 3 + 0.6 * 0.5 + 0.1 * 10)


def test_predictions_are_whole_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "preds.json"
    for number in range(3):
        Predictions(path).add(f"i-{number}", "m", "+ä\n")
        assert len(json.loads(path.read_text())) == number + 1
    assert [p.name for p in tmp_path.iterdir()] == ["preds.json"]
    assert "i-1" in Predictions(path)
    assert "i-3" not in Predictions(path)
    path.write_text('{"i-1": 3}')
    with pytest.raises(ValueError, match="no list of predictions"):
        Predictions(path)
    for torn in (b"", b'[{"instance_id": "i-1", "model', b"\xe4"):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match=r"preds\.json: is no JSON"):
            Predictions(path)
    path.write_text('[{"instance_id": "i-1"')
    with pytest.raises(ValueError, match=r"preds\.json: is no JSON"):
        Predictions(path)
