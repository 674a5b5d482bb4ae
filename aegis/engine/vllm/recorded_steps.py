"""A model's steps on a CPU as the flat lists of operations that they are.

Between two products a model of many modules runs hundreds of lines of Python, and because weights stream through the
caches meanwhile, all that these lines need comes from memory again: a tenth of a small model's step. Yet the operations
of one decode step are those of the next as long as it has as many rows: vLLM relies on that where it compiles a model
between its attentions, and its attention on CPUs is the same operation each time. So steps are recorded while they run,
once for each number of rows, and from then on their operations are run without the modules.

No recording is trusted by itself: a step is replayed once two of them, which know other lengths, agree in every
operation and every argument that is not among the inputs. Where they do not, or where Python gets to see a value or a
shape that depends on values, steps run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq, getitem, itemgetter
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], torch.Tensor]
Replay = Callable[..., torch.Tensor]

_UNTOLD = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape}  # by arguments: which shapes there are afterwards
_LEAVING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class RecordedSteps:
    """The recorded steps of one model. Tensors that it reads besides the inputs of a step keep their place for life,
    and while a step runs only operations of torch write to them."""

    __slots__ = ("_as_before", "_first", "_replays", "_shared")

    def __init__(self) -> None:
        self._first: dict[int, tuple[tuple[int, ...], _Recording]] = {}
        self._replays: dict[int, Replay] = {}
        self._as_before: set[int] = set()
        self._shared: dict[tuple[Any, ...], torch.Tensor] = {}  # constants of replays

    def first_lengths(self, rows: int) -> tuple[int, ...] | None:
        """Those that a step of so many rows knew which was recorded, and is to be recorded again with others."""
        return self._first[rows][0] if rows in self._first else None

    def replayed(self, rows: int) -> bool:
        return rows in self._replays

    def run(self, rows: int, inputs: Sequence[torch.Tensor], lengths: tuple[int, ...], step: Step) -> torch.Tensor:
        """The result of `step()`, which reads `inputs` and changes none of them in shape. If some of them are one
        tensor, they are one tensor in each step of as many rows. `lengths` are all numbers that the step knows and that
        may differ in the next one; two recordings are compared in which each of them differs."""
        if (replay := self._replays.get(rows)) is not None:
            return replay(*inputs)
        known, first = self._first.get(rows, (None, None))
        if rows in self._as_before or (known and any(map(eq, lengths, known))):
            return step()
        recorder = _Recorder(inputs)
        with recorder, _Watch(recorder):
            result = step()
        recording = recorder.recording(result)
        if recording is not None and first is None:
            self._first[rows] = lengths, recording
            return result
        self._first.pop(rows, None)
        if recording is None or first is None or not recording.like(first):
            self._as_before.add(rows)
        else:
            self._replays[rows] = recording.compiled(self._shared)
        return result


@dataclass(frozen=True, slots=True)
class _Line:
    """An operation on values, which have numbers. The last of those it `takes` are given by these `keys`."""

    operation: Any
    keys: tuple[str, ...]
    takes: tuple[int, ...]
    makes: int | None
    changes: bool  # one of its arguments, so that it is needed even if its result is not


@dataclass(frozen=True, slots=True)
class _Recording:
    """The values of the least numbers are the `inputs`."""

    inputs: int
    lines: list[_Line]
    constants: Mapping[int, Any]
    result: int

    def like(self, other: _Recording) -> bool:
        if (self.lines, self.result) != (other.lines, other.result) or self.constants.keys() != other.constants.keys():
            return False
        return all(_same(constant, other.constants[number]) for number, constant in self.constants.items())

    def compiled(self, shared: dict[tuple[Any, ...], torch.Tensor]) -> Replay:
        """A function of the inputs. Constants are those of `shared` where there are such, and else are put there."""
        places = {number: number for number in range(self.inputs)}
        constants: list[Any] = []
        for number, value in self.constants.items():
            places[number] = self.inputs + len(constants)
            constants.append(shared.setdefault(_geometry(value), value) if isinstance(value, torch.Tensor) else value)
        nowhere = self.inputs + len(constants)
        most, free, program = nowhere + 1, list[int](), []
        for line, over in self._needed():
            taken = [places[number] for number in line.takes]
            free += [places[number] for number in over]
            if line.makes is not None and line.makes not in places:
                places[line.makes] = free.pop() if free else most
                most = max(most, places[line.makes] + 1)
            makes = nowhere if line.makes is None else places[line.makes]
            program.append((_keyed(line.operation, line.keys), _taking(taken), makes))
        there, result = [*constants, *[None] * (most - nowhere)], places[self.result]

        def replay(*inputs: torch.Tensor) -> torch.Tensor:
            values = [*inputs, *there]
            for operation, taking, makes in program:
                values[makes] = operation(*taking(values))
            made: torch.Tensor = values[result]
            return made

        return replay

    def _needed(self) -> list[tuple[_Line, list[int]]]:
        """Lines without which the result, or what is changed, would be another; and the numbers of values, made by
        lines, that none reads later."""
        needed, found = {self.result}, []
        made = {line.makes for line in self.lines}
        for line in reversed(self.lines):
            if line.makes is not None and not line.changes and line.makes not in needed:
                continue
            over = {*line.takes} - needed
            found.append((line, sorted(over & made)))
            needed |= over
        return found[::-1]


def _taking(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """The entries at these places of a list."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places) if places else _nothing


def _nothing(_: list[Any]) -> Sequence[Any]:
    return ()


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _keyed(operation: Any, keys: Sequence[str]) -> Callable[..., Any]:
    if not keys:
        return cast(Callable[..., Any], operation)
    count = len(keys)
    return lambda *args: operation(*args[:-count], **dict(zip(keys, args[-count:], strict=True)))


class _Watch(TorchFunctionMode):
    """Watches for values that leave the step without an operation of torch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _LEAVING:
            self._recorder.flat = False
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Numbers every tensor that an operation takes or makes; one that none has made is a constant."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flat = True
        self._inputs = len(inputs)
        self._lines: list[_Line] = []
        self._constants: dict[int, Any] = {}
        self._words: dict[tuple[type, Any], int] = {}  # constants that are no tensors
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._numbered: list[Any] = list(inputs)  # whose identity nothing else gets meanwhile
        for number, tensor in enumerate(inputs):
            self._numbers[id(tensor)] = number

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self._note(operation, args, kwargs, result)
        return result

    def recording(self, result: torch.Tensor) -> _Recording | None:
        """None: what ran cannot be replayed."""
        number = self._numbers.get(id(result))
        if not self.flat or number is None or number < self._inputs or number in self._constants:
            return None
        return _Recording(self._inputs, self._lines, self._constants, number)

    def _note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        results = result if isinstance(result, list | tuple) else [result]
        made = [each for each in results if isinstance(each, torch.Tensor)]
        taken = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if not (taken or made):
            return  # dtypes are always the same
        if not _UNTOLD.isdisjoint(operation.tags) or len(made) + results.count(None) < len(results):
            self.flat = False
        elif not (operation.is_view and self._known_view(taken, made)):
            takes = tuple(self._number(value) for value in (*args, *kwargs.values()))
            alone = isinstance(result, torch.Tensor)
            fresh = any(id(each) not in self._numbers for each in made)
            makes = self._new(result) if fresh else None
            self._lines.append(_Line(operation, tuple(kwargs), takes, makes, bool(operation._schema.is_mutable)))
            if makes is not None and not alone:
                self._take_apart(makes, results)

    def _known_view(self, taken: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
        """Whether its results need no line: they see constants alone, and so are constants, or the only one sees all
        that the argument does, whose number it gets."""
        numbers = [self._number(tensor) for tensor in taken]
        if all(number in self._constants for number in numbers):
            for tensor in made:
                self._number(tensor)
            return True
        alike = len(made) == 1 and id(made[0]) not in self._numbers and _geometry(made[0]) == _geometry(taken[0])
        if alike:
            self._numbers[id(made[0])] = numbers[0]
            self._numbered.append(made[0])
        return alike

    def _take_apart(self, several: int, results: Sequence[torch.Tensor | None]) -> None:
        for at, each in enumerate(results):
            if each is not None and id(each) not in self._numbers:
                takes = several, self._number(at)
                self._lines.append(_Line(getitem, (), takes, self._new(each), False))

    def _number(self, value: Any) -> int:
        """A constant's, if it has none."""
        if isinstance(value, torch.Tensor):
            known = self._numbers.get(id(value))
            return self._constant(value) if known is None else known
        if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in tree_leaves(value)):
            takes = tuple(self._number(each) for each in value)
            number = self._new(None)
            self._lines.append(_Line(_listed, (), takes, number, False))
            return number
        word = type(value), str(value) if isinstance(value, list | tuple | float) else value
        if word not in self._words:
            self._words[word] = self._constant(value)
        return self._words[word]

    def _constant(self, value: Any) -> int:
        number = self._new(value)
        self._constants[number] = value
        return number

    def _new(self, value: Any) -> int:
        self._numbered.append(value)
        if isinstance(value, torch.Tensor):
            self._numbers[id(value)] = len(self._numbered) - 1
        return len(self._numbered) - 1


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The bytes that the tensor sees, and its strides over them."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    sees = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
    return (*sees, tensor.is_conj(), tensor.is_neg())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _geometry(one) == _geometry(other)
    return type(one) is type(other) and bool(one == other)
