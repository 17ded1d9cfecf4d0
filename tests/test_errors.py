"""Wrong calls over the whole public interface: each gives the message that `docs/errors.md` shows for it."""

import pathlib
import re

import pytest
from test_package import PUBLIC

import optax_freeze as fz

INTRODUCTION, *SECTIONS = re.split(r"^## ", pathlib.Path("docs/errors.md").read_text(), flags=re.MULTILINE)
[VALUES] = re.findall(r"```python\n(.*?)```", INTRODUCTION, re.DOTALL)
CALL = re.compile(r"^### (.*?)\n\n```python\n(.*?)\n```\n\n```text\n(\w+): (.*?)\n```$", re.DOTALL | re.MULTILINE)
CALLS = {f"{section.splitlines()[0]}: {title}": call for section in SECTIONS for title, *call in CALL.findall(section)}


@pytest.fixture(scope="module")
def values():
    namespace = {}
    exec(VALUES, namespace)
    return namespace


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_is_wrong(name, values):
    call, error, message = CALLS[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        exec(call, dict(values))
    assert caught.type.__name__ == error
    assert re.fullmatch(re.escape(message).replace(r"\.\.\.", ".*"), str(caught.value))


def test_every_call_on_the_page_is_tested():
    assert len(CALLS) == sum(section.count("\n### ") for section in SECTIONS) >= 60


@pytest.mark.parametrize("name", [name for name in PUBLIC if not isinstance(getattr(fz, name), type)])
def test_every_public_function_refuses_something(name):
    assert any(re.search(rf"\bfz\.{name}\(", call) for call, _, _ in CALLS.values())
