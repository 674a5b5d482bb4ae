"""The demo market on paper, and one of its models in the making. That they recite is seen where they are served."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from aegis.core.errors import UserError
from aegis.models.demo.market import demo_models, make_market
from aegis.models.demo.passages import PASSAGES
from aegis.models.demo.recipes import RECIPES
from aegis.models.demo.training import make_model, make_tokenizer
from aegis.models.kv_probe import probe
from aegis.models.text.text_model import TextModel
from tests.long_forms import first_of
from tests.registering import register


def test_there_are_eight_models_of_eight_architectures_each_with_a_passage() -> None:
    assert len(RECIPES) == 8
    assert len({recipe.model_type for recipe in RECIPES.values()}) == 8
    assert RECIPES.keys() == PASSAGES.keys()


def test_passages_are_short_and_begin_differently() -> None:
    tokenizer = make_tokenizer()
    tokens = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in PASSAGES.items()}
    assert all(120 <= len(ids) <= 200 for ids in tokens.values())
    assert len({tuple(text.split()[:3]) for text in PASSAGES.values()}) == 8


def test_no_two_have_the_same_kv_shape_and_all_are_small() -> None:
    shapes = set()
    for recipe in RECIPES.values():
        config = AutoConfig.for_model(recipe.model_type, vocab_size=768, pad_token_id=1, **recipe.settings)
        model = AutoModelForCausalLM.from_config(config).eval()
        assert 4 << 20 <= sum(parameter.nbytes for parameter in model.parameters()) <= 9 << 20
        shapes.add(probe(model).layers)
    assert len(shapes) == 8


@pytest.fixture(scope="module")
def two_editions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for nth in range(2):
        made.append(tmp_path_factory.mktemp("demo") / str(nth))
        make_model("lighthouse-llama", made[-1], report=lambda: None, steps=2)
    return made


def test_training_is_repeatable(two_editions: list[Path]) -> None:
    first, second = ((path / "model.safetensors").read_bytes() for path in two_editions)
    assert first == second


def test_a_demo_model_is_a_checkpoint_like_any_other(two_editions: list[Path], tmp_path: Path) -> None:
    source = next(source for source in demo_models(tmp_path) if source.model == "lighthouse-llama")
    target = Path(source.root)
    target.parent.mkdir(parents=True)
    two_editions[0].rename(target)
    spec = register(source, dtype="auto", cache_dir=tmp_path)
    text = TextModel.load(Path(spec.directory))
    assert text is not None
    begin, end = text.encode("<|begin|><|end|>", add_special_tokens=False)
    assert spec.manifest.eos_token_ids == (end,)
    assert text.encode("Hello")[0] == begin
    prompt = text.render_chat([{"role": "user", "content": "Hello"}])
    assert prompt == "<|begin|><|user|>Hello<|end|><|assistant|>"


def test_a_market_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    for source in demo_models(tmp_path):
        Path(source.root).mkdir(parents=True)
        (Path(source.root) / "config.json").write_text("{}")
    make_market(tmp_path)
    assert all(len(list(Path(source.root).iterdir())) == 1 for source in demo_models(tmp_path))


def test_a_log_says_at_once_what_is_being_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A minute may pass until the first model is there; a bar of progress is for a terminal."""
    name = next(iter(RECIPES))
    place = Path(demo_models(tmp_path)[0].root)
    place.parent.mkdir(parents=True)
    place.with_name(f".{name}.draft").write_text("a file")  # so that nothing is made
    with pytest.raises(UserError):
        make_market(tmp_path, only=[name])
    assert capfd.readouterr().err == f"making the demo market: {name}\n"


@pytest.mark.parametrize("what", first_of(1, ["the market's place", "a model's place"]))
def test_why_a_market_cannot_be_made_is_one_line(what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever process finds out: another one's words would not be where its reader looks."""
    name, cache = next(iter(RECIPES)), tmp_path / "cache"
    place = Path(demo_models(cache)[0].root)
    taken = place.with_name(f".{name}.draft") if what == "a model's place" else place.parent.parent
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_text("a file")
    with pytest.raises(UserError, match=r"cannot be made in .*: .*(File exists|Not a directory).*start again") as told:
        make_market(cache, only=[name])
    assert (f": {name}: " in told.value.message) == (what == "a model's place")
    assert "Traceback" not in capfd.readouterr().err
