"""Four ranks with images of their own: more than the tower and the key/value heads can be divided by."""

from functools import partial

from tests.execution.rank_images import check_family

CASES = {"images of qwen2_5_vl": partial(check_family, name="qwen2_5_vl")}
