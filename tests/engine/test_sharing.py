"""Ranks that each hold the whole vision tower: which rank encodes which images, and where their rows go."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from saccade.choice.key import Reason
from saccade.config import Tier
from saccade.errors import ConfigError, GraphError
from saccade.execution.codec import Codec
from saccade.execution.verification import audit_graphs, verify_graphs
from saccade.inputs.placeholders import Media
from saccade.layers.parallel import Groups
from saccade.models.vlm import EncoderMode, Model
from saccade.models.weights import load_model
from saccade.scheduling.arrays import places
from saccade.scheduling.orders import ORDER_TYPES, Encode
from saccade.scheduling.packing import (
    Bins,
    MediaPart,
    Shares,
    balanced,
    bucket_of,
    default_cost,
    in_step,
    pack,
    share_out,
    split,
)
from saccade.scheduling.step_plan import EncodeItem
from tests.engine.conftest import Loaded
from tests.engine.rig import executor_of
from tests.engine.test_packing import images, serving_bins
from tests.engine.test_vision import PAGE_ROWS, TOWERS, Rig, alone

Load = Callable[[str], Loaded]
BINS = Bins((32, 64, 128), (5, 5, 6))


def rows(parts: Sequence[MediaPart]) -> int:
    return sum(part.rows for part in parts)


def parts_of(passes: Sequence[Shares]) -> list[MediaPart]:
    return [part for shares in passes for share in shares for part in share]


class TestShareOut:
    @pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
    def test_every_part_is_encoded_once_and_every_pass_fits_a_bucket(self, num_ranks: int) -> None:
        rng, bins = np.random.default_rng(num_ranks), serving_bins()
        for _ in range(60):
            parts = images(rng, int(rng.integers(1, 40)))
            parts += split(len(parts), int(rng.integers(1, 300)), int(rng.integers(1, 200)), bins, num_ranks)
            passes = share_out(parts, bins, num_ranks)
            assert sorted(parts_of(passes), key=repr) == sorted(parts, key=repr)
            for shares in passes:
                assert len(shares) == num_ranks and bucket_of(shares, bins) is not None

    def test_the_largest_share_is_at_most_a_third_above_the_optimum(self) -> None:
        """Compared with all ways to divide the parts. Dealing parts out by number, or regardless of what ranks already
        have, would fail here."""
        rng = np.random.default_rng(1)
        for _ in range(40):
            parts = [MediaPart(i, 0, 1, int(n)) for i, n in enumerate(rng.integers(1, 60, 7))]
            ways = product(range(3), repeat=len(parts))
            best = min(max(np.bincount(way, [part.rows for part in parts], 3)) for way in map(list, ways))
            assert max(map(rows, balanced(parts, 3))) <= best * 4 / 3

    def test_two_ranks_halve_the_cost_of_a_step(self) -> None:
        """Sixteen images of any size on two ranks cost little more than half of what they cost on one."""
        rng, bins = np.random.default_rng(2), serving_bins(16384)
        alone = shared = 0.0
        for _ in range(50):
            parts = images(rng, 16)
            alone += sum(default_cost(bins.rows_for(rows(one), len(one)) or 0) for one in pack(parts, bins))
            shared += sum(default_cost(bucket_of(shares, bins) or 0) for shares in share_out(parts, bins, 2))
        assert shared < 0.56 * alone, f"{shared / alone:.0%}"

    def test_one_image_goes_to_the_first_rank_and_a_video_to_all(self) -> None:
        [part] = split(0, 1, 20, BINS, 4)
        assert share_out([part], BINS, 4) == [[[part], [], [], []]]
        frames = split(0, 7, 20, BINS, 4)
        assert [part.count for part in frames] == [2, 2, 2, 1]
        [shares] = share_out(frames, BINS, 4)
        assert [rows(share) for share in shares] == [40, 40, 40, 20]

    def test_passes_of_ranks_are_aligned_by_size(self) -> None:
        small, large, middle = MediaPart(0, 0, 1, 10), MediaPart(1, 0, 1, 100), MediaPart(2, 0, 1, 50)
        assert in_step([[[small], [large]], [[middle]]]) == [[[large], [middle]], [[small], []]]

    def test_parts_that_exceed_one_pass_take_several(self) -> None:
        parts = [MediaPart(i, 0, 1, 100) for i in range(5)]
        passes = share_out(parts, BINS, 2)
        assert [[len(share) for share in shares] for shares in passes] == [[1, 1], [1, 1], [1, 0]]

    def test_a_part_too_large_for_any_bucket_gets_its_own_pass(self) -> None:
        parts = [MediaPart(0, 0, 1, 500), MediaPart(1, 0, 1, 20), MediaPart(2, 0, 1, 20)]
        assert share_out(parts, BINS, 2) == [[[parts[1]], [parts[2]]], [[parts[0]], []]]
        assert share_out(parts[:1], BINS, 2) == [[[parts[0]], []]]

    def test_a_bucket_needs_a_padding_segment_for_each_share_that_does_not_fill_it(self) -> None:
        """A full share needs none. A shorter one does, even if it has as many frames."""
        assert BINS.rows_for_all([(32, 5), (32, 5)]) == 32
        assert BINS.rows_for_all([(32, 5), (31, 5)]) == 128


class Ranks:
    """Executors of simulated ranks in one process. Each joins its own rows in place of those of the other ranks, so
    rows of an image are correct only on the rank that encoded it."""

    def __init__(self, loaded: Loaded, size: int = 2, **options: Any) -> None:
        made, self.model = loaded
        self.rigs = [
            Rig((made, load_model(made.folder, dtype=torch.float32, groups=groups, encoder_mode="data")), **options)
            for groups in (Groups.imagined(rank, size) for rank in range(size))
        ]
        self.first = self.rigs[0]
        self.composer = self.first.composer
        self.orders: list[Encode] = []
        self._codec = Codec(*ORDER_TYPES)

    def encode(self, media: Sequence[Media]) -> list[Tensor]:
        """The rows of each, read from the rank that encoded them."""
        items = [self.first._item(i, one) for i, one in enumerate(media)]
        found = [torch.zeros_like(alone_rows(self, one)) for one in media]
        for shares in self.composer.shares(media):
            orders = self.composer.encode(0, shares, items, media)
            self.orders.append(orders)
            for rig in self.rigs:
                encoded = executor_of(rig.engine).encode(self._sent(orders))
                assert encoded.problem is None, encoded.problem
            traces = {executor_of(rig.engine).take_trace() for rig in self.rigs}
            assert len(traces) == 1, traces
            for rank, share in enumerate(shares):
                for part in share:
                    self._read(found, self.rigs[rank], part, items)
        return found

    def _read(self, found: list[Tensor], rig: Rig, part: MediaPart, items: Sequence[EncodeItem]) -> None:
        assert rig.state.vision_rows is not None
        where = places(part.first * part.units, part.rows, items[part.item].pages, PAGE_ROWS)
        start = part.first * part.units
        found[part.item][:, start : start + part.rows] = rig.state.vision_rows[:, where]

    def _sent(self, orders: Encode) -> Encode:
        """The orders as another rank receives them."""
        packed = self._codec.pack(orders)
        buffer = np.zeros(packed.num_bytes + 64, np.uint8)
        start = -buffer.ctypes.data % 64
        packed.write(buffer[start:])
        sent: Encode = self._codec.unpack(buffer[start : start + packed.num_bytes])
        return sent


def alone_rows(ranks: Ranks, media: Media) -> Tensor:
    return alone(ranks.first, media, ranks.model)


def check(ranks: Ranks, media: Sequence[Media], what: object = "") -> None:
    for found, one in zip(ranks.encode(media), media, strict=True):
        expected = alone_rows(ranks, one)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


class TestRanksWithTheirOwnImages:
    @pytest.mark.parametrize(("family", "size"), [(name, 2) for name in TOWERS] + [("qwen2_5_vl", 4)])
    @pytest.mark.parametrize("has_graphs", [True, False])
    def test_random_mixes(self, loaded: Load, family: str, size: int, has_graphs: bool) -> None:
        tiers = frozenset({Tier.CAPACITY}) if has_graphs else frozenset[Tier]()
        ranks, rng = Ranks(loaded(family), size, strict=True, tiers=tiers), np.random.default_rng(size)
        for i in range(20):
            check(ranks, ranks.first.mix(rng), f"mix {i}")
        for rig in ranks.rigs:
            replays, fallbacks = rig.encoder.graphs.stats.replays, rig.encoder.graphs.stats.fallbacks
            assert bool(replays[Tier.CAPACITY]) == has_graphs
            assert set(fallbacks) == (set() if has_graphs else {Reason.GRAPHS_OFF})
        busy = [[bool(one.pictures) for one in (orders.vision, *orders.others)] for orders in ranks.orders]
        assert any(map(all, busy)) and not all(map(all, busy)), (
            "some passes keep all ranks busy, some leave one without images"
        )

    def test_a_frame_too_large_for_any_bucket_is_encoded_by_all_ranks(self, loaded: Load) -> None:
        ranks, rng = Ranks(loaded("qwen3_vl"), max_units=24), np.random.default_rng(1)
        rig = ranks.first
        check(ranks, [rig.video(rng, 2, 6, 6), rig.image(rng, 8, 8)])
        large = [orders for orders in ranks.orders if not orders.others]
        assert [orders.vision.decision.reason for orders in large] == [Reason.TOO_LARGE] * 2
        assert all((orders.vision.values["targets"][1:] == 0).all() for orders in large)
        assert all(rig.encoder.graphs.stats.fallbacks == {Reason.TOO_LARGE: 2} for rig in ranks.rigs)

    def test_ranks_with_their_own_images_have_no_exact_graphs(self, loaded: Load) -> None:
        both = frozenset({Tier.CAPACITY, Tier.EXACT})
        for tiers in (both, frozenset({Tier.EXACT})):
            rig = Ranks(loaded("qwen3_vl"), tiers=tiers, exact_after=1).first
            assert rig.encoder.graphs.settings.tiers == {Tier.CAPACITY}
            assert not list(rig.composer.usual_layouts()) and not rig.engine.idle.can_capture

    def test_targets_place_the_rows_of_each_rank(self, loaded: Load) -> None:
        ranks, rng = Ranks(loaded("qwen3_vl")), np.random.default_rng(3)
        rig = ranks.first
        media = [rig.image(rng, 40, 40), rig.image(rng, 16, 16), rig.image(rng, 24, 8)]
        items = [rig._item(i, one) for i, one in enumerate(media)]
        [shares] = ranks.composer.shares(media)
        assert [[part.item for part in share] for share in shares] == [[0], [1, 2]]
        orders = ranks.composer.encode(0, shares, items, media)
        targets = orders.vision.values["targets"]
        assert targets is orders.others[0].values["targets"], "sent once"
        counts = [item.num_rows for item in items]
        assert targets.shape == (2, counts[0])
        for rank, share in enumerate(shares):
            expected = np.concatenate([places(0, counts[p.item], items[p.item].pages, PAGE_ROWS) for p in share])
            assert targets[rank].tolist() == expected.tolist() + [0] * (counts[0] - len(expected))

    def test_shares_too_large_for_any_bucket_are_encoded_one_by_one(self, loaded: Load) -> None:
        """Packing does not know about windows. Strips have more than a bucket holds, which only composing finds out.
        Ranks that ran such shares eagerly would join rows of different shapes."""
        ranks, rng = Ranks(loaded("qwen2_5_vl"), max_units=320, tiers=frozenset()), np.random.default_rng(4)
        media = [ranks.first.video(rng, 1, 1, 300), ranks.first.video(rng, 1, 1, 20)]
        items = [ranks.first._item(i, one) for i, one in enumerate(media)]
        [shares] = ranks.composer.shares(media)
        assert bucket_of(shares, ranks.composer.bins) == 320
        with pytest.raises(GraphError, match="each is encoded alone"):
            ranks.composer.encode(0, shares, items, media)
        strip, other = (ranks.composer.encode(0, [share, []], items, media) for share in shares)
        assert not strip.others and strip.vision.decision.padded_to is None
        assert other.others and other.vision.decision.padded_to is not None
        for one in media:
            check(ranks, [one])

    def test_a_rank_that_cannot_read_its_image_stays_in_step(
        self, loaded: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other ranks wait for it in the pass. Comparing traces afterwards shows that it failed."""
        ranks, rng = Ranks(loaded("qwen3_vl")), np.random.default_rng(5)
        rig = ranks.rigs[1]
        media = [rig.image(rng, 40, 40), rig.image(rng, 16, 16)]
        [shares] = ranks.composer.shares(media)
        orders = ranks.composer.encode(0, shares, [rig._item(i, one) for i, one in enumerate(media)], media)

        def fail(*args: object) -> None:
            raise ValueError("no pixels")

        monkeypatch.setattr(rig.encoder._pixels, "patchify", fail)
        executor = executor_of(rig.engine)
        assert "ValueError" in (executor.encode(orders).problem or "")
        assert rig.encoder.graphs.stats.replays[Tier.CAPACITY] == 1 and "ValueError" in executor.take_trace()

    @pytest.mark.parametrize("family", TOWERS)
    def test_graphs_are_verified_and_audited(self, loaded: Load, family: str) -> None:
        rig = Ranks(loaded(family)).rigs[1]
        executor = executor_of(rig.engine)
        report = verify_graphs(executor)
        assert report.is_right, str(report)
        found = [finding for row in audit_graphs(executor).rows for finding in row.findings]
        assert not found, found


class TestAuto:
    def test_a_tower_stays_whole_if_its_heads_cannot_be_divided(self, loaded: Load) -> None:
        folder = loaded("qwen3_vl")[0].folder  # two vision heads, four text heads
        mode: EncoderMode

        def load(size: int, mode: EncoderMode) -> Model:
            return load_model(folder, groups=Groups.imagined(0, size), encoder_mode=mode)

        assert load(1, "auto").encoder_mode is None and load(1, "data").encoder_mode is None
        for mode, expected in (("auto", "weights"), ("weights", "weights"), ("data", "data")):
            found = load(2, mode)
            assert (found.encoder_mode, found.why_whole) == (expected, "")
        found = load(4, "auto")
        assert found.encoder_mode == "data" and "num_heads = 2 cannot be split evenly over 4 ranks" in found.why_whole
        assert ";" not in found.why_whole
        with pytest.raises(ConfigError, match="--mm-encoder-tp-mode data"):
            load(4, "weights")
