"""`tools/in_turn.py`: a benchmark in several checkouts, one after the other, and its figures side by side."""

import json
from math import exp, log, sqrt
from pathlib import Path
from statistics import stdev

import pytest

from tools.in_turn import figures, main, ratio, run

BENCH = """
import json, sys
from pathlib import Path
log, output = Path(sys.argv[1]), Path(sys.argv[3])
log.write_text(log.read_text() + "{name} ")
number = log.read_text().count("{name}")
lines = [dict(size="560x560", way=way, rows=324, ms={ms} + number / 8, host_ms=1) for way in ("eager", "exact")]
output.write_text(json.dumps(dict(lines=lines, capture_s=2.5)))
"""


def test_figures_are_named_by_their_path_and_the_texts_next_to_them() -> None:
    data = {"lines": [{"way": "exact", "ms": 2, "rows": 9}, {"way": "eager", "ms": 3.5}], "of": {"a": {"ms": 1.0}}}
    assert dict(figures(data, ["ms"])) == {"lines 1 exact ms": 2.0, "lines 2 eager ms": 3.5, "of a ms": 1.0}


def test_an_interval_is_that_of_a_paired_t_test() -> None:
    first, other = [4.0, 4.4, 3.9], [4.1, 4.6, 4.05]
    logs = [log(b / a) for a, b in zip(first, other, strict=True)]
    half = 4.303 * stdev(logs) / sqrt(3)
    middle = sum(logs) / 3
    assert ratio(first, other) == pytest.approx((exp(middle), exp(middle - half), exp(middle + half)))


def test_checkouts_take_turns_with_their_own_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "order"
    order.write_text("")
    for name, ms in {"old": 4.0, "new": 2.0}.items():
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "some_bench.py").write_text(BENCH.format(name=name, ms=ms))
    trees = [word for name in ("old", "new") for word in ("--tree", f"{name}={tmp_path / name}")]
    main([*trees, "--rounds", "3", "--figures", "ms", "--keep", str(tmp_path), "--", "some_bench", str(order)])
    assert order.read_text().split() == ["old", "new", "new", "old", "new", "old"]
    kept = json.loads((tmp_path / "new-3.json").read_text())
    assert kept["lines"][0]["ms"] == 2.375
    said = capsys.readouterr().out
    assert "lines 2 560x560 exact ms" in said and "4.250" in said and "2.250" in said and "new : old" in said


def test_packages_of_the_caller_are_found_after_a_checkouts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where packages are installed aside, only PYTHONPATH leads to them."""
    for folder, ms in (("tree/src", 2.0), ("packages", 9.0)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "which_sources.py").write_text(f"MS = {ms}")
    (tmp_path / "packages" / "some_bench.py").write_text(
        "import json, sys, which_sources\nopen(sys.argv[2], 'w').write(json.dumps(dict(ms=which_sources.MS)))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert run(tmp_path / "tree", ["some_bench"], tmp_path / "out.json") == {"ms": 2.0}


def test_a_failing_run_ends_the_benchmark_and_its_output_is_shown(tmp_path: Path) -> None:
    trees = ["--tree", f"a={tmp_path}", "--tree", f"b={tmp_path}"]
    with pytest.raises(SystemExit, match="No module named no_such_bench"):
        main([*trees, "--", "no_such_bench"])


def test_a_single_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 checkouts in 3 rounds"):
        main(["--tree", f"a={tmp_path}", "--", "some_bench"])
