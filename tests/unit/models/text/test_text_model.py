"""Text and tokens without torch; streams that never show half a character."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from aegis.core.errors import UserError
from aegis.models.text.text_model import TextModel
from tests import checkpoints

MESSAGES = [{"role": "user", "content": "the hat"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def text(directory: Path) -> TextModel:
    loaded = TextModel.load(directory)
    assert loaded is not None
    return loaded


plain = st.text().filter(lambda string: "<|" not in string)
"""No special tokens, which have no text; the drawing of strings knows of those that stand in our sources."""


def pieces(text: TextModel, tokens: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.push(token) for token in tokens), stream.end()]


@given(string=plain)
def test_text_survives_tokens(text: TextModel, string: str) -> None:
    assert text.decode(text.encode(string, add_special_tokens=False)) == string


@given(string=plain)
def test_a_stream_is_the_text_in_whole_characters(text: TextModel, string: str) -> None:
    streamed = pieces(text, text.encode(string, add_special_tokens=False))
    assert "".join(streamed) == string
    if "\N{REPLACEMENT CHARACTER}" not in string:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in streamed)


@given(tokens=st.lists(st.integers(0, checkpoints.VOCAB_SIZE - 1), max_size=60))
def test_a_stream_of_any_tokens_is_their_text(text: TextModel, tokens: list[int]) -> None:
    assert "".join(pieces(text, tokens)) == text.decode(tokens)


def test_a_character_comes_with_its_last_byte(text: TextModel) -> None:
    tokens = text.encode("東", add_special_tokens=False)
    assert len(tokens) == 3
    assert pieces(text, tokens) == ["", "", "東", ""]


def test_an_unfinished_character_comes_at_the_end(text: TextModel) -> None:
    tokens = text.encode("a東", add_special_tokens=False)[:-1]
    assert pieces(text, tokens)[-1] == "\N{REPLACEMENT CHARACTER}"


def test_characters_stay_whole_where_each_token_ends_within_one() -> None:
    """As merges of emoji do: the last byte of one character and the first of the next."""
    string = "".join(chr(0x1F600 + at) for at in range(24))
    letters = dict(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(string)).keys()
    spelled = "".join(letters)
    words = [spelled[:3], *(spelled[at : at + 4] for at in range(3, len(spelled), 4))]
    whole = Tokenizer(models.WordLevel({word: at for at, word in enumerate(dict.fromkeys(words))}, unk_token=words[0]))
    whole.decoder = decoders.ByteLevel()
    streamed = pieces(TextModel(whole, {}, None), [whole.token_to_id(word) for word in words])
    assert "".join(streamed) == string and all(streamed[at] == "" for at in range(4))


def test_endless_noise_is_not_held_back_for_ever(text: TextModel) -> None:
    first_byte = text.encode("東", add_special_tokens=False)[0]
    stream = text.stream()
    sent = "".join(stream.push(first_byte) for _ in range(100))
    assert len(sent) >= 90


def test_a_long_text_is_decoded_like_a_short_one(text: TextModel) -> None:
    once = text.encode("<|user|>the hat 東")
    assert text.decode(once * 400) == "".join([text.decode(once)] * 400)


def test_special_tokens_have_no_text(text: TextModel) -> None:
    tokens = text.encode("<|user|>the", add_special_tokens=False)
    assert text.decode(tokens) == "the"
    assert text.decode(tokens, skip_special_tokens=False) == "<|user|>the"


def test_the_chat_template_is_rendered(text: TextModel) -> None:
    assert text.chat_template is not None
    assert text.render_chat(MESSAGES) == "<|user|>the hat<|end|><|assistant|>"


def test_a_template_may_refuse(directory: Path, tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must\nalternate') }}")
    loaded = TextModel.load(tmp_path)
    assert loaded is not None
    with pytest.raises(UserError, match="refuses the messages: roles must alternate"):
        loaded.render_chat(MESSAGES)


def test_a_request_cannot_bring_its_own_template(text: TextModel) -> None:
    with pytest.raises(UserError, match="chat_template"):
        text.render_chat(MESSAGES, chat_template="{{ 1 }}")


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    loaded = TextModel.load(tmp_path)
    assert loaded is not None and loaded.chat_template is None
    with pytest.raises(UserError, match="the model has no chat template"):
        loaded.render_chat(MESSAGES)


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    assert TextModel.load(tmp_path) is None


def test_torch_is_never_imported(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from aegis.models.text.text_model import TextModel\n"
        f"text = TextModel.load(Path({str(directory)!r}))\n"
        "text.render_chat([{'role': 'user', 'content': 'hi'}]); text.stream().push(text.encode('a')[0])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("most", "text", "pair"),
    [
        (1, ([0], 0), ([0], 0)),
        (2, ([0, 1], 0), ([0, 2], 0)),
        (3, ([0, 2, 1], 0), ([0, 1, 1], 2)),
        (None, ([0, 2, 2, 2, 1], 0), ([0, 2, 2, 1, 3, 1], 4)),
    ],
)
def test_a_text_is_cut_also_to_fewer_tokens_than_are_special(
    most: int | None, text: tuple[list[int], int], pair: tuple[list[int], int]
) -> None:
    """The library leaves such a text whole."""
    words = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="b"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    assert TextModel(words, {}, None).fit(["a a a", ("a a", "b")], most) == [text, pair]
