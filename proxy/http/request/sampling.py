"""The parameters that completions and chat share, from JSON to `Sampling`."""

from __future__ import annotations

from secrets import randbits

from msgspec import Struct, structs

from aegis.core.errors import UserError
from aegis.core.model import ModelSpec
from aegis.core.request import PRIORITY_MAX, Sampling
from aegis.core.rng import derive
from proxy.http.errors import shown
from proxy.http.fields import Fields
from proxy.http.market import Served
from proxy.http.request_ids import is_request_id
from proxy.http.structured.output_format import OutputFormat, read_structured

CHOICES_MAX = 128
SEQUENCES_MAX = 1024  # of one request, all prompts and choices together
LOGPROBS_MAX = 20
STOPS_MAX = 16
STOP_CHARACTERS_MAX = 256
TOKENS_MAX = 1 << 31
TEMPERATURE_MIN = 1e-5  # above 0: what is less is greedy in all but name
REPETITION_PENALTY_MIN = 1e-3

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

_TELLING = frozenset({"request_id", "return_token_ids", "stream", "stream_options"})
"""Parameters that do not change what is generated."""


class GenerationParameters(Struct, frozen=True):
    """The client's parameters for generating its choices and for the form of the reply.

    `sampling` is complete but for `max_tokens` and `seed`, of which each sequence gets its own.
    """

    sampling: Sampling
    held_to: OutputFormat | None
    max_tokens: int | None
    seed: int
    choices: int
    priority: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    request_id: str | None
    fingerprint: str  # the same for requests that ask for the same, however it is to be told
    shown: tuple[str, ...] = ()  # special tokens that are text


def seed_of(seed: int, choice: int) -> int:
    """Choice 0 is what the same request with one choice gives; the others have streams of their own."""
    return seed if choice == 0 else derive(seed, "choice", choice)


def read_parameters(
    fields: Fields, served: Served, *, max_tokens: int | None, logprobs: int | None
) -> GenerationParameters:
    """Raises UserError naming the parameter at fault. `max_tokens` and `logprobs` were read by the caller: their names
    and forms differ."""
    stream = fields.flag("stream")
    seed = fields.integer("seed", None)
    fields.text("user", None, most_characters=1024)
    sampling = _read_sampling(fields, served.spec, most_tokens=max_tokens or TOKENS_MAX, logprobs=logprobs)
    wanted = read_structured(fields)
    if wanted:
        sampling = held_to(fields, sampling, wanted)
    parameters = GenerationParameters(
        sampling=sampling,
        held_to=wanted,
        max_tokens=max_tokens,
        seed=randbits(63) if seed is None else seed,
        choices=fields.integer("n", 1, low=1, high=CHOICES_MAX),
        priority=fields.integer("priority", 0, low=-PRIORITY_MAX, high=PRIORITY_MAX),
        stop=_read_stop(fields, served),
        stream=stream,
        include_usage=_read_include_usage(fields, stream),
        return_token_ids=fields.flag("return_token_ids", served.text is None),
        request_id=_read_request_id(fields),
        fingerprint=fields.fingerprint(_TELLING),
    )
    for name, neutral in _UNSUPPORTED.items():
        fields.unsupported(name, neutral)
    return parameters


def _read_sampling(fields: Fields, spec: ModelSpec, *, most_tokens: int, logprobs: int | None) -> Sampling:
    ignore_eos = fields.flag("ignore_eos")
    top_k = fields.integer("top_k", 0, low=-1, high=TOKENS_MAX)
    stop_token_ids = read_token_ids(fields, "stop_token_ids", spec, most=1024)
    ends = () if ignore_eos else spec.manifest.eos_token_ids
    return Sampling(
        max_tokens=1,
        min_tokens=fields.integer("min_tokens", 0, low=0, high=most_tokens),
        temperature=_read_temperature(fields),
        top_p=fields.number("top_p", 1.0, low=0, high=1, open_low=True),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, low=0, high=1),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2, high=2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=REPETITION_PENALTY_MIN, high=2),
        logit_bias=_read_logit_bias(fields, spec),
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_token_ids))),
        logprobs=logprobs,
    )


def held_to(fields: Fields, sampling: Sampling, wanted: OutputFormat) -> Sampling:
    """Such output ends where its grammar does. Raises UserError where something else is asked for."""
    for name in ("ignore_eos", "min_tokens"):
        if fields.take(name):
            raise fields.refusal(name, f"cannot be had together with {wanted.param!r}")
    return structs.replace(sampling, grammar=wanted.grammar)


def _read_temperature(fields: Fields) -> float:
    temperature = fields.number("temperature", 1.0, low=0, high=2)
    if 0 < temperature < TEMPERATURE_MIN:
        raise fields.refusal("temperature", f"must be 0 or at least {TEMPERATURE_MIN:g}, not {shown(temperature)}")
    return temperature


def read_max_tokens(fields: Fields, name: str) -> int | None:
    return fields.integer(name, None, low=1, high=TOKENS_MAX)


def check_sequences(prompts: int, parameters: GenerationParameters) -> None:
    """Raises UserError where one request asks for too many sequences."""
    if prompts * parameters.choices > SEQUENCES_MAX:
        message = f"{prompts} prompts with 'n' = {parameters.choices} make more than {SEQUENCES_MAX} sequences"
        raise UserError(message, param="n")


def read_token_ids(fields: Fields, name: str, spec: ModelSpec, *, most: int) -> tuple[int, ...]:
    return checked_token_ids(fields, name, fields.items(name, most=most), spec)


def checked_token_ids(fields: Fields, name: str, values: list[object], spec: ModelSpec) -> tuple[int, ...]:
    """Raises UserError unless each is an id of the model's vocabulary."""
    vocabulary = spec.manifest.vocab_size
    ids: list[int] = []
    for value in values:
        if type(value) is not int or not 0 <= value < vocabulary:
            raise fields.refusal(name, f"must hold token ids in [0, {vocabulary}), not {shown(value)}")
        ids.append(value)
    return tuple(ids)


def _read_stop(fields: Fields, served: Served) -> tuple[str, ...]:
    one = fields.take("stop")
    stops = [one] if isinstance(one, str) else fields.items("stop", most=STOPS_MAX)
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= STOP_CHARACTERS_MAX:
            problem = f"must be a string, or a list of up to {STOPS_MAX}, of 1 to {STOP_CHARACTERS_MAX} characters each"
            raise fields.refusal("stop", problem)
    if stops and served.text is None:
        raise fields.refusal("stop", f"needs a tokenizer, which {served.spec.model!r} has not: use 'stop_token_ids'")
    return tuple(dict.fromkeys(stops))


def _read_include_usage(fields: Fields, stream: bool) -> bool:
    if fields.given("stream_options") and not stream:
        raise fields.refusal("stream_options", "is for requests with 'stream': true only")
    options = fields.nested("stream_options")
    include = options.flag("include_usage")
    options.unsupported("include_obfuscation", (False,))
    options.unsupported("continuous_usage_stats", (False,))
    options.end()
    return include


def _read_request_id(fields: Fields) -> str | None:
    value = fields.text("request_id", None, most_characters=128)
    if value is not None and not is_request_id(value):
        raise fields.refusal("request_id", "must be printable ASCII without spaces")
    return value


def _read_logit_bias(fields: Fields, spec: ModelSpec) -> tuple[tuple[int, float], ...]:
    """Keys are token ids as strings, since JSON has no others."""
    given = fields.mapping("logit_bias") or {}
    biases = fields.nested("logit_bias")
    found: dict[int, float] = {}
    for key in given:
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        if not 0 <= token < spec.manifest.vocab_size or key != str(token):
            raise fields.refusal("logit_bias", f"has the key {shown(key)}, which is no token id of this model")
        found[token] = biases.number(key, 0.0, low=-100, high=100)
    return tuple(sorted(found.items()))
