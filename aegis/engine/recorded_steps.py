"""A model's steps on a CPU as the flat lists of operations that they are.

Between two products a model of many modules runs hundreds of lines of Python, and because weights stream through the
caches meanwhile, all that these lines need comes from memory again: a tenth of a small model's step. Which operations a
step is made of hangs on its number of rows alone, wherever a model may be compiled as one graph. So steps are recorded
while they run, once for each number of rows, and from then on their operations are run without the modules.

No recording is trusted by itself: a step is replayed once two, made one after the other, agree in every operation and
every argument that is not among the inputs. Where they do not, or where an operation answers with something that Python
can decide upon, steps run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], torch.Tensor]
Replay = Callable[..., torch.Tensor]

_WRITTEN_OUT = (bool, int, str, type(None))  # and finite floats: arguments that stand in a line as they are


class RecordedSteps:
    """Of one model. What it reads besides the inputs of a step lies where it lies for life."""

    __slots__ = ("_as_before", "_first", "_replays")

    def __init__(self) -> None:
        self._first: dict[int, _Recording] = {}
        self._replays: dict[int, Replay] = {}
        self._as_before: set[int] = set()

    def begun(self, rows: int) -> bool:
        """Whether a step of so many rows has run."""
        return rows in self._replays or rows in self._first or rows in self._as_before

    def replayed(self, rows: int) -> bool:
        return rows in self._replays

    def run(self, rows: int, inputs: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
        """What `step()` returns, which reads `inputs` and changes none of them in shape. Where some of them are one
        tensor, they are so in each step of as many rows."""
        if (replay := self._replays.get(rows)) is not None:
            return replay(*inputs)
        if rows in self._as_before:
            return step()
        recorder = _Recorder(inputs)
        with recorder:
            result = step()
        recording, first = recorder.recording(result), self._first.pop(rows, None)
        if recording is None or (first is not None and not recording.like(first)):
            self._as_before.add(rows)
        elif first is None:
            self._first[rows] = recording
        else:
            self._replays[rows] = recording.compiled()
        return result


@dataclass(frozen=True, slots=True)
class _Line:
    """An operation, `call` in Python's words, `reads` the names in it, `makes` those of its results."""

    makes: tuple[str, ...]
    call: str
    reads: frozenset[str]
    changes: bool  # one of its arguments, so that it is needed even if no result is


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: int
    lines: list[_Line]
    constants: Mapping[str, Any]
    result: str

    def like(self, other: _Recording) -> bool:
        if (self.lines, self.result) != (other.lines, other.result) or self.constants.keys() != other.constants.keys():
            return False
        return all(_same(constant, other.constants[name]) for name, constant in self.constants.items())

    def compiled(self) -> Replay:
        """A function of the inputs. What a line makes is forgotten after the last line that reads it."""
        needed, body = {self.result}, []
        for line in reversed(self.lines):
            if not line.changes and needed.isdisjoint(line.makes):
                continue
            over = sorted(name for name in {*line.makes, *line.reads} - needed if name.startswith("made"))
            if over:
                body.append(f"del {', '.join(over)}")
            body.append(f"{', '.join(line.makes)} = {line.call}" if line.makes else line.call)
            needed |= line.reads
        taken = ", ".join(f"given{at}" for at in range(self.inputs))
        source = "\n    ".join([f"def replay({taken}):", *reversed(body), f"return {self.result}"])
        names = dict(self.constants)
        exec(source, names)
        replay: Replay = names["replay"]
        return replay


class _Recorder(TorchDispatchMode):
    """Names every tensor that an operation takes or makes; a tensor that none has made is a constant."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = len(inputs)
        self._lines: list[_Line] = []
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by identity
        self._named: list[Any] = []  # whose identity nothing else gets meanwhile
        self._flat = True
        for at, tensor in enumerate(inputs):
            self._call(tensor, f"given{at}")

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self._note(operation, args, kwargs, result)
        return result

    def recording(self, result: torch.Tensor) -> _Recording | None:
        """None: what ran cannot be replayed."""
        name = self._names.get(id(result), "")
        if not self._flat or not name.startswith("made"):
            return None
        return _Recording(self._inputs, self._lines, self._constants, name)

    def _note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = result if isinstance(result, list | tuple) else [result]
        made = [each for each in results if isinstance(each, torch.Tensor)]
        if torch.Tag.inplace_view in operation.tags or len(made) + results.count(None) < len(results):
            self._flat = False
            return
        if operation.is_view and self._known_view(args, kwargs, made):
            return
        reads: set[str] = set()
        written = [self._written(value, reads) for value in args]
        written += [f"{key}={self._written(value, reads)}" for key, value in kwargs.items()]
        call = f"{self._name(operation)}({', '.join(written)})"
        makes: tuple[str, ...] = ()
        if any(id(each) not in self._names for each in made):
            makes = tuple(self._made(each) for each in results)
            call = call if isinstance(result, torch.Tensor) or len(makes) > 1 else f"{call}[0]"
        self._lines.append(_Line(makes, call, frozenset(reads), bool(operation._schema.is_mutable)))

    def _known_view(self, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> bool:
        """Whether it sees nothing but constants, and so is one, or all that another tensor does, whose name it gets."""
        taken = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        names = [self._name(tensor) for tensor in taken]
        if all(name.startswith("constant") for name in names):
            for tensor in made:
                self._name(tensor)
            return True
        alike = len(made) == 1 and id(made[0]) not in self._names and _geometry(made[0]) == _geometry(taken[0])
        if alike:
            self._call(made[0], names[0])
        return alike

    def _written(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._written(each, reads) for each in value)}]"
        if type(value) in _WRITTEN_OUT or (type(value) is float and isfinite(value)):
            return repr(value)
        reads.add(self._name(value))
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A constant's, if it has none."""
        if id(value) not in self._names:
            name = f"constant{len(self._constants)}"
            self._constants[name] = self._call(value, name)
        return self._names[id(value)]

    def _made(self, value: torch.Tensor | None) -> str:
        name = f"made{len(self._named)}"
        self._named.append(value)
        if value is not None:
            self._names.setdefault(id(value), name)
        return name

    def _call(self, value: Any, name: str) -> Any:
        self._named.append(value)
        self._names[id(value)] = name
        return value


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which bytes it sees and how."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _geometry(one) == _geometry(other)
    return type(one) is type(other) and bool(one == other)
