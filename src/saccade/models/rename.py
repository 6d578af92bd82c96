"""Tables that map checkpoint names to the slots of a model.

First a name's prefix is made canonical, because checkpoints of different ages nest parts differently. Then the first
matching rule applies. `{word}` in a template matches one part of the dotted name and is the same on both sides. Rules
also work backwards, so that an error can name a missing tensor as the checkpoint would.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One checkpoint tensor, and the slots it fills.

    A tensor is optionally unbound along its first axis (`{i}` in the targets counts the pieces), then flattened to a
    matrix (all axes but the first are joined), then transposed. Several targets split the first axis. "if_needed"
    transposes only a matrix that does not fit otherwise: checkpoints of one family exist in both orders.
    """

    source: str
    targets: tuple[str, ...]
    unbind: bool = False
    flatten: bool = False
    transpose: Literal["never", "always", "if_needed"] = "never"

    def match(self, name: str) -> dict[str, str] | None:
        found = _pattern(self.source).fullmatch(name)
        return found.groupdict() if found else None

    def backwards(self, slot_name: str) -> str | None:
        """The checkpoint name of the tensor that fills this slot."""
        for target in self.targets:
            if found := _pattern(target).fullmatch(slot_name):
                return self.source.format(**found.groupdict())
        return None


# Tables that old releases of transformers saved, and how an FP8 KV cache would be scaled, in the names of
# llm-compressor, ModelOpt and AutoFP8.
IGNORED = (
    r"(.*\.)?rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)",
    r".*\.embeddings\.position_ids",
    r".*\.self_attn\.((qkv_proj\.|[kv]_proj\.)?(k|v|kv)_scale|[kv]_proj\.output_scale)",
)

# What formats call the factor of a weight and of its inputs; none of them stores the inverse.
SCALES = ((".weight_scale_inv", ".weight_scale"), (".activation_scale", ".input_scale"))


@dataclass(frozen=True, slots=True)
class Renames:
    """`prefixes` are tried in order. `ignored` matches names in some checkpoints that no model needs."""

    prefixes: tuple[tuple[str, str], ...]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = IGNORED

    def __post_init__(self) -> None:
        for rule in self.rules:
            words = set(_pattern(rule.source).groupindex) | ({"i"} if rule.unbind else set())
            for target in rule.targets:
                assert words == set(_pattern(target).groupindex), f"other words in {rule.source} than in {target}"

    def plus(self, rules: tuple[Rule, ...], *, prefixes: tuple[tuple[str, str], ...] = ()) -> "Renames":
        """With more rules, and prefixes that are tried before the others."""
        return replace(self, prefixes=prefixes + self.prefixes, rules=self.rules + rules)

    def is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def find(self, name: str) -> tuple[Rule, dict[str, str]] | None:
        short = self._shorten(name)
        for rule in self.rules:
            words = rule.match(short)
            if words is not None:
                return rule, words
        return None

    def backwards(self, slot_name: str, seen: Collection[str] = ()) -> str:
        """The checkpoint name of a slot's tensor, with the prefix and the name of scales that the `seen` names use."""
        names = (rule.backwards(slot_name) for rule in self.rules)
        short = next((name for name in names if name is not None), slot_name)
        for theirs, ours in SCALES:
            if short.endswith(ours) and any(name.endswith(theirs) for name in seen):
                short = short.removesuffix(ours) + theirs
        fitting = [(p, canonical) for p, canonical in self.prefixes if short.startswith(canonical)]
        for prefix, canonical in fitting:
            if any(name.startswith(prefix) for name in seen):
                return prefix + short.removeprefix(canonical)
        return fitting[0][0] + short.removeprefix(fitting[0][1]) if fitting else short

    def names_of(self, slot_name: str) -> list[str]:
        """The names of a slot's tensor in checkpoints of all ages."""
        shorts = [name for rule in self.rules if (name := rule.backwards(slot_name)) is not None]
        return [
            prefix + short.removeprefix(canonical)
            for short in shorts
            for prefix, canonical in self.prefixes
            if short.startswith(canonical)
        ]

    def _shorten(self, name: str) -> str:
        for theirs, ours in SCALES:
            if name.endswith(theirs):
                name = name.removesuffix(theirs) + ours
        for prefix, canonical in self.prefixes:
            if name.startswith(prefix):
                return canonical + name.removeprefix(prefix)
        return name


def one(source: str, target: str) -> Rule:
    return Rule(source, (target,))


TEXT_PREFIXES = (
    ("lm_head.", "head."),
    ("language_model.lm_head.", "head."),
    ("model.language_model.", "text."),
    ("language_model.model.", "text."),
    ("model.", "text."),
    # Models saved without a head, such as Qwen3-Embedding.
    ("embed_tokens.", "text.embed_tokens."),
    ("layers.", "text.layers."),
    ("norm.", "text.norm."),
)

_LAYER, _OURS = "text.layers.{n}", "decoder.layers.{n}"

DECODER_RULES = (
    one("text.embed_tokens.{w}", "decoder.embedding.{w}"),
    one("text.norm.{w}", "decoder.norm.{w}"),
    one("head.{w}", "decoder.head.{w}"),
    one(_LAYER + ".input_layernorm.{w}", _OURS + ".attention_norm.{w}"),
    one(_LAYER + ".self_attn.o_proj.{w}", _OURS + ".attention.out.{w}"),
    one(_LAYER + ".self_attn.{p}_proj.{w}", _OURS + ".attention.qkv.{p}.{w}"),
    one(_LAYER + ".self_attn.{p}_norm.{w}", _OURS + ".attention.{p}_norm.{w}"),
    one(_LAYER + ".mlp.down_proj.{w}", _OURS + ".mlp.down.{w}"),
    one(_LAYER + ".mlp.{p}_proj.{w}", _OURS + ".mlp.gate_up.{p}.{w}"),
)

# Without norms after attention and MLP, post_attention_layernorm is the norm before the MLP.
PRE_NORM_RULES = (one(_LAYER + ".post_attention_layernorm.{w}", _OURS + ".mlp_norm.{w}"),)

POST_NORM_RULES = (
    one(_LAYER + ".post_attention_layernorm.{w}", _OURS + ".attention_post_norm.{w}"),
    one(_LAYER + ".pre_feedforward_layernorm.{w}", _OURS + ".mlp_norm.{w}"),
    one(_LAYER + ".post_feedforward_layernorm.{w}", _OURS + ".mlp_post_norm.{w}"),
)

ROUTER_RULES = (one(_LAYER + ".mlp.gate.weight", _OURS + ".mlp.router.weight"),)

# One tensor per expert and projection.
EXPERT_RULES = (one(_LAYER + ".mlp.experts.{i}.{p}_proj.{w}", _OURS + ".mlp.experts.{i}.{p}.{w}"),)

_EXPERT = _OURS + ".mlp.experts.{i}."

# All experts of a layer in one tensor, [gate | up] along the output axis; block scales have the same layout.
FUSED_EXPERT_RULES = (
    Rule(
        _LAYER + ".mlp.experts.gate_up_proj_scale_inv",
        (_EXPERT + "gate.weight_scale", _EXPERT + "up.weight_scale"),
        unbind=True,
        transpose="if_needed",
    ),
    Rule(
        _LAYER + ".mlp.experts.down_proj_scale_inv",
        (_EXPERT + "down.weight_scale",),
        unbind=True,
        transpose="if_needed",
    ),
    Rule(
        _LAYER + ".mlp.experts.gate_up_proj",
        (_EXPERT + "gate.weight", _EXPERT + "up.weight"),
        unbind=True,
        transpose="if_needed",
    ),
    Rule(_LAYER + ".mlp.experts.down_proj", (_EXPERT + "down.weight",), unbind=True, transpose="if_needed"),
)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", template)
    pieces[::2] = [re.escape(piece) for piece in pieces[::2]]
    pieces[1::2] = [f"(?P<{word}>[^.]+)" for word in pieces[1::2]]
    return re.compile("".join(pieces))
