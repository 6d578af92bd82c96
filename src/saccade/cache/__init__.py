"""What outlives a step on the device, as bookkeeping: KV blocks, the prefix cache, the encoder cache."""

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex, Entry
from saccade.cache.prefix import PrefixCache, Span

__all__ = ["BlockPool", "EncoderIndex", "Entry", "PrefixCache", "Span"]
