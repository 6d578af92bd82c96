"""Decodes the media of a prompt after they have been measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.measuring import Sized
from saccade.inputs.media.images import ImageLimits, Pixels, decode_image
from saccade.inputs.media.media_pool import MediaPool
from saccade.inputs.media.sampling import Sample
from saccade.inputs.media.videos import load_video
from saccade.inputs.placeholders import Media
from saccade.inputs.plans import MediaPlan, plan_image, plan_video
from saccade.inputs.text.chat_messages import MediaRef
from saccade.models.media import ImageSettings, VideoSettings


@dataclass(frozen=True, slots=True)
class MediaDecoder:
    """`images` are the checkpoint's own settings, if it takes any: a request's may differ. Without a `pool`, files are
    decoded in this process."""

    images: ImageSettings | None
    limits: ImageLimits
    pool: MediaPool | None

    def decode_all(self, sized: Sequence[Sized], allowance: Allowance, param: str) -> list[Media]:
        """Decodes all media, without digests. Only a video file can have more tokens than were measured."""
        num_tokens = sum(item.num_tokens for item in sized)
        media: list[Media] = []
        for item in sized:
            allowance.check_cancelled()
            begun = perf_counter()
            pixels, plan = self._decode(item, allowance)
            media.append(Media(item.ref.kind, pixels, plan, b"", perf_counter() - begun))
            num_tokens += plan.num_tokens - item.num_tokens
            allowance.check_tokens(num_tokens, "the images and videos alone have", param)
        return media

    def _decode(self, item: Sized, allowance: Allowance) -> tuple[Pixels, MediaPlan]:
        if isinstance(item.settings, ImageSettings):
            return self._decode_image(item, item.settings, allowance)
        with item.ref.named_in_errors():
            frames, fps, sample = self._load_video(item, item.settings, allowance)
        num_frames, height, width = frames.shape[:3]
        fps = fps or item.ref.fps
        if sample is None:
            plan = plan_video(num_frames, height, width, fps, item.settings)
            chosen = frames[list(plan.frames)]
        else:
            plan = plan_video(sample.num_frames, height, width, fps, item.settings, sample.frames)
            chosen = frames[np.searchsorted(sample.frames, plan.frames)]
        chosen.flags.writeable = False
        return chosen, plan

    def _load_video(
        self, item: Sized, settings: VideoSettings, allowance: Allowance
    ) -> tuple[Pixels, float | None, Sample | None]:
        if self.pool is None:
            return load_video(item.ref.source, self.limits, allowance, settings=settings)
        return self.pool.video(item.ref.source, self.limits, allowance, settings)

    def _decode_image(self, item: Sized, settings: ImageSettings, allowance: Allowance) -> tuple[Pixels, MediaPlan]:
        assert item.image is not None, "images are measured"
        with item.ref.named_in_errors():
            if self.pool is None:
                pixels = decode_image(item.image)
            else:
                pixels = self.pool.image(item.image, self.limits, allowance)
        plan = plan_image(pixels.shape[0], pixels.shape[1], settings)
        self._check_plan(plan, settings, item.ref)
        return pixels, plan

    def _check_plan(self, plan: MediaPlan, settings: ImageSettings, ref: MediaRef) -> None:
        """The lower bound of a request can round an image up to more pixels than the engine has memory for."""
        height, width = plan.size_hw
        assert self.images is not None, "a model without them takes no images"
        if settings.min_pixels > self.images.min_pixels and height * width > self.images.max_pixels:
            message = f"the image would be resized to {width}x{height} pixels; the limit is {self.images.max_pixels} "
            message += "pixels: ask for fewer (mm_processor_kwargs.min_pixels)"
            raise RequestError(message, param=ref.param, code="image_too_large")
