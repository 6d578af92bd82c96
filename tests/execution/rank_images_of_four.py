"""Four ranks that each encode their own images: more ranks than the tower and the KV heads can be split over."""

from functools import partial

from tests.execution.rank_images import check_family

CASES = {"images of qwen2_5_vl": partial(check_family, name="qwen2_5_vl")}
