"""Videos that were sent differently but have the same encoded frames."""

import json
import shutil
from pathlib import Path

import numpy as np

from saccade import bundled
from saccade.inputs.processor import Processor


def test_the_same_frames_at_another_size_are_another_video(tmp_path: Path) -> None:
    """The last frame is repeated to fill a time step, but the number of frames sent decides the size. So three frames,
    and the same three with the last one twice, give the encoder the same pixels at different sizes."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(bundled.path(), folder)
    settings = folder / "video_preprocessor_config.json"
    raw = json.loads(settings.read_text())
    raw.pop("num_frames", None)
    settings.write_text(json.dumps(raw))
    processor = Processor.from_folder(folder)
    three = np.random.default_rng(0).integers(0, 256, (3, 256, 256, 3)).astype(np.uint8)
    parts = [{"type": "video", "video": None}, {"type": "text", "text": "what is it?"}]
    shorter, longer, again = (
        processor.chat([{"role": "user", "content": parts}], media=[list(frames)]).media[0]
        for frames in (three, np.concatenate([three, three[-1:]]), three)
    )
    assert np.array_equal(shorter.pixels, longer.pixels) and shorter.plan.size_hw != longer.plan.size_hw
    assert shorter.digest != longer.digest and shorter.digest == again.digest
