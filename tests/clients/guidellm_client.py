"""guidellm: a small run of streams with pictures, without a failure."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.pictures import MODEL

CHECKPOINT = Path(__file__).parents[2] / "src" / "saccade" / "bundled" / "checkpoint"
RUN_TIMEOUT_S = 600
NUM_REQUESTS, NUM_OUTPUT_TOKENS = 4, 8
NUM_IMAGE_TOKENS = 36  # of a 64x64 image, as the server reports them
WORDS = (
    *("run", "--disable-console", "--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}"),
    *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
    *("--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={NUM_OUTPUT_TOKENS}"),
    *("--data", "kind=synthetic_image,width=64,height=64"),
)


def check_run(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        target = ("--backend", f"kind=openai_http,target={url},model={MODEL}", "--output", f"kind=json,path={report}")
        command = [sys.executable, "-m", "guidellm", *WORDS, *target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
                              env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
        assert done.returncode == 0 and report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
        [found] = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}, totals
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
    assert metrics["output_token_count"]["successful"]["mean"] == NUM_OUTPUT_TOKENS
    assert metrics["image"]["tokens"]["input"]["successful"]["mean"] == NUM_IMAGE_TOKENS
