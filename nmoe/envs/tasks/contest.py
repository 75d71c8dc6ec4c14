"""Reads the tests of programming-contest problems from the record formats of public datasets.

| dataset | fields |
|---|---|
| APPS, TACO | `input_output`: {"inputs": [...], "outputs": [...], "fn_name"} as JSON text |
| LiveCodeBench | `public_test_cases`, `private_test_cases` (also packed): lists of {"input", "output", "testtype"}; `metadata` |
| DeepCoder, PRIME | `tests`: such a list with "type", or an object as in APPS; as JSON text or not |
| SYNTHETIC-1 | `verification_info`: {"language", "test_cases"} |
| CodeContests | `public_tests`, `private_tests`, `generated_tests`: {"input": [...], "output": [...]} |
| Codeforces of Open-R1 | `official_tests`: a list of {"input", "output"} |
| verl | `reward_model.ground_truth`, any of these as JSON text |
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nmoe.envs.tasks.record_fields import Record
from nmoe.errors import UserError
from nmoe.parsing import json_of

_LISTS = (
    "input_output",
    "tests",
    "public_test_cases",
    "private_test_cases",
    "official_tests",
    "public_tests",
    "private_tests",
    "generated_tests",
)
_TRUTHS = ("reward_model", "reward_spec")
_TEST_FIELDS = (*_LISTS, "verification_info", *_TRUTHS)
FIELDS = (
    *_TEST_FIELDS,
    "metadata",
    "fn_name",
    "checker",
    "generated_checker",
    "input_file",
    "output_file",
    "time_limit",
    "memory_limit",
    "memory_limit_bytes",
    "tolerance",
)
MAX_BYTES = 8 << 20
"""The maximum total size of a record's tests as JSON text; tests beyond it are left out."""

_MAX_UNPACKED = 256 << 20
_STDIN, _CALL = ("stdin_stdout", "stdin", "stdio"), ("functional", "function_call")


@dataclass(frozen=True)
class Contest:
    """The tests of a record, by standard input or by calls of a function. Examples with two tests each:

        Contest(inputs=("1 2\\n", "3 4\\n"), outputs=("3\\n", "7\\n"))
        Contest(inputs=([1, 2], [3, 4]), outputs=(3, 7), function="add")

    `left_out` counts tests that were too large. If `listed`, each output is a list of one element, which is the call's result
    itself or wraps it: `outputs=([3], [7])` is right for a function that returns 3 and 7, and for one that returns [3] and [7].
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str = ""
    left_out: int = 0
    listed: bool = False


def contest_of(record: Record) -> Contest:
    """Reads the tests of a record. Raises UserError for a record without tests, or with tests that cannot be run here."""
    for name in ("checker", "generated_checker"):
        if record.get(name):
            raise UserError(
                f"field {name!r}: several outputs are right, and a program decides which; drop such records"
            )
    for name in ("input_file", "output_file"):
        if record.get(name):
            raise UserError(f"field {name!r}: the program reads or writes a file, not standard input and output")
    tests = list(_tests(record))
    if not tests:
        raise UserError(f"no tests in any of the fields {', '.join(_TEST_FIELDS)}; the fields are {', '.join(record)}")
    functions = {test.function for test in tests}
    if len(functions) > 1:
        raise UserError(
            f"the tests are of several kinds: {', '.join(sorted(one or 'standard input' for one in functions))}"
        )
    (function,) = functions
    if function and not function.isidentifier():
        raise UserError(f"the tests call {function!r}, which is no name of a function")
    kept, room = [], MAX_BYTES
    for test in tests:
        size = len(json.dumps((test.given, test.wanted)))
        if size <= room:
            kept.append(test)
            room -= size
    if not kept:
        raise UserError(f"no test has less than {MAX_BYTES >> 20} MB")
    if not function and not any(test.wanted.strip() for test in kept):
        raise UserError("the tests expect no output, so that they prove nothing")
    return Contest(
        tuple(test.given for test in kept),
        tuple(test.wanted for test in kept),
        function,
        len(tests) - len(kept),
        all(test.listed for test in tests),
    )


class _Test(NamedTuple):
    """One test: input, expected output, the name of the function (empty for a test by standard input), and whether the output may
    be wrapped in a list that is not part of the result.
    """

    given: Any
    wanted: Any
    function: str = ""
    listed: bool = False


def _tests(record: Record) -> Iterator[_Test]:
    function = _function(record)
    for name in _LISTS:
        if record.get(name):
            yield from _read(name, _plain(name, record[name]), function)
    if record.get("verification_info"):
        name = "verification_info"
        found = _plain(name, record[name])
        if not isinstance(found, Mapping) or "test_cases" not in found:
            raise UserError(f"field {name!r} has no test_cases")
        if found.get("language", "python") not in ("python", "python3"):
            raise UserError(f"field {name!r} is for {found['language']}; only Python is run here")
        yield from _read(name, found["test_cases"], function)
    for name in _TRUTHS:
        found = record.get(name)
        if isinstance(found, Mapping) and found.get("ground_truth"):
            yield from _read(f"{name}.ground_truth", _plain(f"{name}.ground_truth", found["ground_truth"]), function)


def _read(field: str, found: Any, function: str) -> Iterator[_Test]:
    """Yields the tests in a record's field: an object of parallel lists, or a list of objects. Raises UserError for anything
    else."""
    if isinstance(found, Mapping):
        inputs, outputs = (found.get(f"{name}s", found.get(name)) for name in ("input", "output"))
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise UserError(f"field {field!r} has no inputs and as many outputs")
        named = found.get("fn_name") or function
        # APPS wraps each result of a call in a list, and its own checks take the result with the list and without.
        listed = all(isinstance(one, list) and len(one) == 1 for one in outputs)
        for given, wanted in zip(inputs, outputs, strict=True):
            test = _call(field, given, wanted, named) if named else _stdin(field, given, wanted)
            yield test._replace(listed=bool(named) and listed)
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for case in found:
            if not isinstance(case, Mapping) or "input" not in case or "output" not in case:
                raise UserError(f"field {field!r}: a test has no input and output")
            kind = case.get("testtype") or case.get("type") or (_CALL if case.get("fn_name") else _STDIN)[0]
            inner = case.get("metadata")
            named = case.get("fn_name") or (inner.get("func_name") if isinstance(inner, Mapping) else "") or function
            if kind in _CALL and named:
                yield _call(field, case["input"], case["output"], named)
            elif kind in _STDIN:
                yield _stdin(field, case["input"], case["output"])
            else:
                lacks = (
                    "names no function"
                    if kind in _CALL
                    else f"is of type {kind!r}, not {' or '.join((*_STDIN, *_CALL))}"
                )
                raise UserError(f"field {field!r}: a test {lacks}")
    else:
        raise UserError(f"field {field!r} holds {type(found).__name__}, not tests")


def _stdin(field: str, given: Any, wanted: Any) -> _Test:
    texts = []
    for value in (given, wanted):
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            value = "\n".join(value)
        if not isinstance(value, str):
            raise UserError(f"field {field!r}: an input or output of a program is {type(value).__name__}, not text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"field {field!r}: a text with a lone surrogate, which no program can be given") from None
        texts.append(value)
    return _Test(texts[0], texts[1])


def _call(field: str, given: Any, wanted: Any, function: str) -> _Test:
    """Reads a test that calls a function: the arguments are a list, or a text with one argument as JSON in each line
    (LiveCodeBench).
    """
    if isinstance(given, str):
        try:
            given = [json_of(line) for line in given.split("\n") if line.strip()]
            wanted = json_of(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise UserError(f"field {field!r}: the call of {function} is no JSON: {error}") from None
    if not isinstance(given, list):
        raise UserError(f"field {field!r}: the arguments of {function} are {type(given).__name__}, not a list")
    return _Test(given, wanted, function)


def _function(record: Record) -> str:
    """Returns the name of the function to call, from the record's `fn_name` or its metadata's `func_name`; empty without one."""
    if isinstance(record.get("fn_name"), str):
        return str(record["fn_name"])
    found = record.get("metadata")
    if isinstance(found, str) and found.lstrip().startswith("{"):
        found = _plain("metadata", found)
    return str(found.get("func_name") or "") if isinstance(found, Mapping) else ""


def _plain(field: str, value: Any) -> Any:
    """Decodes a field's value if it is JSON text, or JSON packed as in LiveCodeBench. Raises UserError for any other text."""
    if not isinstance(value, str):
        return value
    try:
        text = value if value.lstrip()[:1] in ("{", "[") else _unpacked(field, value)
        return json_of(text)
    except ValueError as error:
        raise UserError(f"field {field!r} is no JSON: {error}") from None


def _unpacked(field: str, packed: str) -> str:
    """Unpacks base64 of zlib of a JSON text, plain or pickled, without unpickling: only a pickle of a single text is read, by its
    opcodes. Raises UserError for anything else, and for more than 256 MB."""
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(packed, validate=True), _MAX_UNPACKED)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(f"field {field!r} is neither JSON nor packed tests: {error}") from None
    if unzip.unconsumed_tail:
        raise UserError(f"field {field!r} unpacks to more than {_MAX_UNPACKED >> 20} MB")
    if data[:1] in (b"[", b"{"):
        return data.decode()
    texts = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"):
                texts.append(str(argument))
            elif opcode.name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"):
                raise UserError(
                    f"field {field!r} is a pickle with the opcode {opcode.name}; only one text is read, because unpickling more "
                    "could run code: store the tests as JSON"
                )
    except (ValueError, IndexError) as error:
        raise UserError(f"field {field!r} is no pickle of a text: {error}") from None
    if len(texts) != 1:
        raise UserError(f"field {field!r} is a pickle of {len(texts)} texts, not of one")
    return texts[0]


def seconds_of(record: Record) -> float | None:
    """Returns the record's time limit in seconds: 2.0 for `{"time_limit": "2 seconds"}`, 2, and {"seconds": 2, "nanos": 0}; None
    without one.
    """
    value = record.get("time_limit")
    if isinstance(value, Mapping):
        seconds, nanos = value.get("seconds") or 0, value.get("nanos") or 0
        return float(seconds) + float(nanos) / 1e9 or None
    return _amount(
        "time_limit", value, {"": 1.0, "s": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
    )


def memory_mb_of(record: Record) -> float | None:
    """Returns the record's memory limit in MB: 256.0 for `{"memory_limit": "256 megabytes"}`; None without one."""
    if record.get("memory_limit_bytes"):
        return _amount("memory_limit_bytes", record["memory_limit_bytes"], {"": 1 / (1 << 20)})
    megabytes = dict.fromkeys(("", "mb", "mib", "megabyte", "megabytes"), 1.0)
    return _amount(
        "memory_limit", record.get("memory_limit"), {**megabytes, "kb": 1 / 1024, "gb": 1024.0, "gigabytes": 1024.0}
    )


def tolerance_of(record: Record) -> float | None:
    """Returns the error, between 0 and 1, that the record permits in a number of the output, absolutely or relative to the expected
    number; None if numbers are compared as text."""
    value = record.get("tolerance")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise UserError(f"field 'tolerance' is {value!r}, not a number between 0 and 1")
    return float(value)


def _amount(field: str, value: Any, units: Mapping[str, float]) -> float | None:
    if value is None or value == "" or value == 0:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or found is None or found[2].lower() not in units:
        raise UserError(f"field {field!r} is {value!r}, not a number of {max(units, key=len) or 'bytes'}")
    return float(found[1]) * units[found[2].lower()]
