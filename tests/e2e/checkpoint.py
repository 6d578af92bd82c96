"""A tiny Qwen3-VL with all the files of a checkpoint, whose vocabulary can write any ASCII text, such as JSON."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.rig import image_settings
from tests.models import tiny

MARKERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif -%}
{%- for message in messages -%}
{{ message.role }} {% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == "text" %}{{ part.text }}{% elif part.type == "video" %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %} {% endfor -%}
{%- if shout %}{{ shout }}{% endif %}{% if add_generation_prompt %}assistant {% endif %}"""


def make_checkpoint(folder: Path) -> Path:
    """Ids from 3 on are the printable ASCII characters and the newline, then come the image tokens."""
    tiny.make("qwen3_vl", folder)
    image_settings(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=100,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=[*map(chr, range(33, 127)), "Ġ", "Ċ"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox and the lazy dog"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in MARKERS])
    assert tokenizer.token_to_id("<|image_pad|>") == tiny.IMAGE
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"add_bos_token": False, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7, "top_k": 20}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
