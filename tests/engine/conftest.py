import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.rig import image_settings
from tests.inputs.folders import CORPUS
from tests.models import tiny
from tests.models.conftest import Loaded as Loaded
from tests.models.conftest import loaded as loaded

TEMPLATE = """{%- for message in messages -%}
{{ message.role }} {% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == "text" %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """A tiny Qwen3-VL with all files of a checkpoint. Its first 100 ids are text; the image tokens follow."""
    found = tiny.make("qwen3_vl", tmp_path_factory.mktemp("checkpoint"))
    image_settings(found.folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<pad>", "<bos>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:1] * 3, trainer)
    markers = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in markers])
    assert tokenizer.token_to_id("<|image_pad|>") == tiny.IMAGE
    tokenizer.save(str(found.folder / "tokenizer.json"))
    (found.folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "<eos>"}')
    (found.folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (found.folder / "chat_template.jinja").write_text(TEMPLATE)
    return found
