"""aiperf: a small run of streams with pictures, without a failure."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.pictures import MODEL

ROOT = Path(__file__).parents[2]
RUN_TIMEOUT_S = 600
NUM_REQUESTS = 4
WORDS = (
    *("profile", "--model", MODEL, "--endpoint-type", "chat", "--streaming", "--ui", "none"),
    *("--tokenizer", str(ROOT / "src" / "saccade" / "bundled" / "checkpoint")),
    *("--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--workers-max", "1"),
    *("--synthetic-input-tokens-mean", "20", "--output-tokens-mean", "8"),
    *("--image-width-mean", "64", "--image-height-mean", "64"),
)


def check_profile(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aiperf", *WORDS, "--url", url, "--artifact-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        report = Path(folder) / "profile_export_aiperf.json"
        assert done.returncode == 0 and report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
        found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found
    assert found["time_to_first_token"]["avg"] > 0 and found["output_sequence_length"]["avg"] >= 1, found
    assert not found.get("error_summary"), found
