"""Selectors: patterns, functions, rules and their algebra."""

import copy
import functools
import operator
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_freeze as fz
from optax_freeze._spec import patterns as _glob


def chosen(selector, params):
    """The paths that a selector freezes."""
    leaves = jax.tree_util.tree_leaves_with_path(fz.resolve(params, selector))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, answer in leaves if answer]


ENCODER = ["encoder/layer_0/bias", "encoder/layer_0/kernel", "encoder/layer_1/bias", "encoder/layer_1/kernel"]
HEAD = ["head/bias", "head/kernel"]


class TestPath:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            *((pattern, ENCODER) for pattern in ("encoder", "encoder/**", "encoder/**/**", "encoder/*", "encoder/*/*")),
            *((pattern, ENCODER) for pattern in ("encoder/layer_?", "*er")),
            *((pattern, ENCODER + HEAD) for pattern in ("**", "*")),
            *((pattern, ENCODER[2:]) for pattern in ("encoder/layer_[1-9]", "encoder/layer_[!0]")),
            ("encoder/**/kernel", ["encoder/layer_0/kernel", "encoder/layer_1/kernel"]),
            ("**/kernel", ["encoder/layer_0/kernel", "encoder/layer_1/kernel", "head/kernel"]),
            ("**/layer_0/**", ENCODER[:2]),
            *((pattern, ["head/kernel"]) for pattern in ("*/kernel", "head/kernel")),
            ("encoder/layer_0/kernel/**", ["encoder/layer_0/kernel"]),
        ],
    )
    def test_glob(self, params, pattern, expected):
        assert chosen(fz.path(pattern), params) == expected
        assert chosen(pattern, params) == expected

    @pytest.mark.parametrize(
        ("pattern", "path", "matches"),
        [
            *((pattern, "encoder/0/kernel", False) for pattern in ("enc", "0", "kernel", "/encoder", "encoder/")),
            ("a[[]0]", "a[0]", True),
            ("a[", "a[", True),
            ("a.b", "a.b", True),
            ("a.b", "axb", False),
            ("a[]]", "a]", True),
            ("a[!]]", "a]", False),
            ("a[/]b", "a/b", False),
            ("a?b", "a/b", False),
            ("a[!x]b", "a/b", False),
            ("[a-c]", "b", True),
            ("[a-c]", "d", False),
            ("[-^&~|]", "^", True),
            ("line*", "line\nbreak", True),
            ("a/**/b", "a/b", True),
            ("a/**/b", "a/x/y/b", True),
            ("a/**/b", "ab", False),
            ("**/a", "a", True),
            ("", "", True),
            ("**", "", True),
            ("", "a", False),
            ("mlp/~/linear_0", "mlp/~/linear_0/w", True),
        ],
    )
    def test_glob_translation(self, pattern, path, matches):
        assert bool(_glob.glob(pattern).fullmatch(path)) is matches

    def test_several_patterns_are_a_union(self, params):
        both = ("encoder/layer_0", "head/bias")
        for union in (fz.path(*both), list(both), both):
            assert chosen(union, params) == [*ENCODER[:2], "head/bias"]

    @pytest.mark.parametrize(
        ("pattern", "error"),
        [
            ("encoder**", r"whole segments(.|\n)*'encoder\*'"),
            ("layer_[7-0]", r"not a valid pattern\n  at: fz\.path"),
            ("[a--b]", r"not a valid pattern\n  at: fz\.path"),
            ("layer_[!0-11]", r"not a number(.|\n)*fz\.where"),
        ],
    )
    def test_what_is_no_pattern(self, pattern, error):
        with pytest.raises(ValueError, match=error):
            fz.path(pattern)

    @pytest.mark.parametrize(
        ("pattern", "expression", "count", "last"),
        [
            ("layer_[0-11]", "f'layer_{i}' for i in range(0, 12)", 12, "layer_11"),
            ("layer_[10-15]/kernel", "f'layer_{i}/kernel' for i in range(10, 16)", 6, "layer_15/kernel"),
            ("layer_[00-31]", "f'layer_{i:02}' for i in range(0, 32)", 32, "layer_31"),
            ("layer_[08-10]", "f'layer_{i:02}' for i in range(8, 11)", 3, "layer_10"),
            ("layer_[0-3,10, 12]", "f'layer_{i}' for i in [*range(0, 4), 10, 12]", 6, "layer_12"),
            ("s[9-10]/l[1-12]", "f's{i}/l{j}' for i in range(9, 11) for j in range(1, 13)", 24, "s10/l12"),
            ("a[0-3]{x}[0-11]", "f'a[0-3]{{x}}{i}' for i in range(0, 12)", 12, "a[0-3]{x}11"),
            ("a'\\[0-11]", 'f"a\'\\\\{i}" for i in range(0, 12)', 12, "a'\\11"),
        ],
    )
    def test_a_range_of_numbers_in_brackets(self, pattern, expression, count, last):
        with pytest.raises(ValueError, match="not a number") as error:
            fz.path("encoder", pattern)
        assert f"for these numbers use fz.path(*[{expression}]), or fz.regex" in str(error.value)
        globs = eval(f"[{expression}]")
        assert len(set(globs)) == count
        assert globs[-1] == last
        fz.path(*globs)

    def test_brackets_that_hold_characters(self):
        fz.path("[0-7]", "[01]", "[012]", "[0-7,9]", "[a-f0-29]", "[90-7]", "a[[]0-11]", "[10]")

    def test_a_key_in_brackets(self, params):
        params = {"a[0]": params, "b": {"c[1]": {"d": jnp.ones(1)}}}
        for pattern, literal in [("a[0]", "a[[]0]"), ("b/c[1]/d", "b/c[[]1]/d"), ("**/c[1]", "**/c[[]1]")]:
            with pytest.raises(ValueError, match="matches no leaf") as error:
                fz.resolve(params, pattern)
            assert f"in them; for a literal bracket write {literal!r}" in str(error.value)
            assert chosen(literal, params)

    @pytest.mark.parametrize(
        ("pattern", "expression"),
        [
            ("encoder.*", "encoder.*"),
            (r"encoder/layer_\d+", r"encoder/layer_\d+/.*"),
            ("(encoder|head)/.*", "(encoder|head)/.*"),
            ("^encoder", "^encoder/.*"),
            ("encoder/layer_[0-9]+/bias", "encoder/layer_[0-9]+/bias"),
        ],
    )
    def test_a_regular_expression_for_a_glob(self, params, pattern, expression):
        with pytest.raises(ValueError, match="matches no leaf") as error:
            fz.resolve(params, pattern)
        assert str(error.value).endswith(f"fix: for a regular expression write fz.regex({expression!r})")
        assert chosen(fz.regex(expression), params)

    @pytest.mark.parametrize(
        ("pattern", "fix"),
        [
            ("**/*norm*", "case differs: LayerNorm_0, encoder/LayerNorm_1"),
            ("layernorm_1", "case differs: encoder/LayerNorm_1"),
            ("kernel", "a pattern begins at the root; at any depth write '**/kernel'"),
            ("LayerNorm_1/bias", "a pattern begins at the root; at any depth write '**/LayerNorm_1/bias'"),
            ("key[1]", "nearest paths: key[[]0]"),
            (
                fz.regex("norm"),
                "case differs: LayerNorm_0/scale, encoder/LayerNorm_1/bias; ignore it by '(?i).*(?:norm).*'",
            ),
            (fz.regex("encoder"), "a regex must match the whole path: 'encoder/.*'"),
            (fz.regex("head/*"), "for a glob write fz.path('head/*')"),
            (fz.regex("enc*/*/bias"), "for a glob write fz.path('enc*/*/bias')"),
            (fz.regex(r"key.1."), r"nearest paths: key\[0\]"),
        ],
    )
    def test_a_hint_fits_when_it_is_typed_in(self, pattern, fix):
        params = {
            "encoder": {"LayerNorm_1": {"bias": 1.0}},
            "LayerNorm_0": {"scale": 1.0},
            "head": {"kernel": 1.0},
            "key[0]": 1.0,
        }
        with pytest.raises(ValueError, match="matches no leaf") as caught:
            fz.resolve(params, pattern)
        assert fix in str(caught.value)
        for written in re.findall(r"'(.*)'", fix) or re.split(", ", fix.partition(": ")[2]):
            make = fz.path if isinstance(pattern, str) or "fz.path" in fix else fz.regex
            assert chosen(make(written), params)

    def test_what_is_no_regular_expression_that_matches(self, params):
        for pattern in ("encoder.layer_0", "encoder(", "tail.*", "*kernel+"):
            with pytest.raises(ValueError, match="fix: nearest paths"):
                fz.resolve(params, pattern)

    def test_takes_strings(self):
        for wrong, fix in [
            (lambda: fz.all_except(fz.path("a") | "b"), r"~\(fz\.path\('a'\) \| fz\.path\('b'\)\)"),
            (lambda: fz.all_except(fz.all_except("a")), r"fz\.path\('a'\)"),
            (lambda: fz.regex(fz.where(is_bias)), r"fz\.where\(is_bias\)"),
        ]:
            with pytest.raises(TypeError, match=rf"takes strings(.|\n)*fix: pass the selector itself: {fix}$"):
                wrong()
        with pytest.raises(TypeError, match=r"wrap a function in ~fz\.where"):
            fz.all_except(is_bias)  # pyright: ignore

    def test_a_lone_leaf_has_the_empty_path(self):
        assert [fz.resolve(jnp.ones(2), spec) for spec in ("", "**", False)] == [True, True, False]


class TestRegex:
    def test_matches_the_whole_path(self, params):
        assert chosen(fz.regex(r"encoder/layer_\d+/bias"), params) == ["encoder/layer_0/bias", "encoder/layer_1/bias"]
        for selector in (fz.regex("encoder"), fz.regex("head/.*", "tail/.*")):
            with pytest.raises(ValueError, match="matches no leaf"):
                fz.resolve(params, selector)

    @pytest.mark.parametrize("make", [lambda: fz.regex("a/.*"), lambda: fz.path("a/*"), lambda: fz.path("**")])
    def test_a_key_may_hold_a_line_break(self, make):
        assert fz.resolve({"a": {"b\nc": jnp.ones(2)}}, make()) == {"a": {"b\nc": True}}


class TestWhere:
    def test_sees_path_shape_and_dtype(self, params):
        seen = []

        def is_bias(path, leaf):
            assert isinstance(leaf, jax.ShapeDtypeStruct)
            seen.append((path, leaf.shape, leaf.dtype))
            return leaf.ndim == 1

        assert chosen(fz.where(is_bias), params) == ["encoder/layer_0/bias", "encoder/layer_1/bias", "head/bias"]
        assert seen[1] == ("encoder/layer_0/kernel", (3, 4), jnp.float32)

    def test_may_match_nothing(self, params):
        assert chosen(fz.where(lambda path, leaf: False), params) == []
        assert chosen(fz.where(lambda path, leaf: np.bool_(True)), params) == ENCODER + HEAD
        assert fz.resolve({"f": jnp.tanh, "w": jnp.ones(2)}, fz.where(lambda path, leaf: leaf.ndim == 0))["f"]

    @pytest.mark.parametrize(
        "look",
        [bool, lambda leaf: bool(np.any(leaf)), lambda leaf: leaf == 0, lambda leaf: leaf != 0, float, jnp.sum],
        ids=["bool", "np.any", "==", "!=", "float", "jnp.sum"],
    )
    def test_no_value_is_made_up(self, params, look):
        of_tree = lambda shapes: jax.tree.map(lambda leaf: bool(look(leaf)), shapes)  # noqa: E731
        for spec in (fz.where(lambda path, leaf: bool(look(leaf))), of_tree):
            with pytest.raises(TypeError, match="looks at values"):
                fz.resolve(params, spec)


class TestAlgebra:
    def test_strings_and_lists_on_either_side(self):
        assert "head" | fz.path("encoder") == fz.path("head") | fz.path("encoder")
        assert "head" & fz.path("**/bias") == fz.path("head") & fz.path("**/bias")
        assert fz.path("head") | ["a", "b"] == fz.path("head") | fz.path("a", "b")
        assert fz.all_except("head") == ~fz.path("head")
        assert fz.all_except(["a", "b"]) == fz.all_except("a", "b")

    def test_an_empty_intersection_is_no_error(self, params):
        assert chosen(fz.path("head") & "encoder", params) == []
        assert chosen(fz.path("encoder") & ~fz.path("**/bias") | "head/bias", params) == [*ENCODER[1::2], "head/bias"]

    def test_operands_are_strict(self, params):
        for selector in (fz.path("head") | "x", fz.path("head") & "x", ~fz.path("x")):
            with pytest.raises(ValueError, match="matches no leaf"):
                fz.resolve(params, selector)

    @pytest.mark.parametrize("join", [operator.or_, operator.and_])
    def test_a_thousand_of_them(self, join):
        names = [f"layer_{i % 11}" for i in range(1100)]
        each = [fz.path(name) if join is operator.or_ else fz.all_except(name) for name in names]
        forward = functools.reduce(join, each)
        backward = functools.reduce(lambda rest, one: join(one, rest), reversed(each))
        params = dict.fromkeys([*names, "head"], 1.0)
        for selector in (forward, backward):
            assert selector == pickle.loads(pickle.dumps(selector)) == copy.deepcopy(selector)
            assert hash(selector) == hash(copy.deepcopy(selector))
            assert repr(selector).count("fz.") == 1100
            assert jax.tree.leaves(selector) == []
            assert chosen(selector, params) == (sorted({*names}) if join is operator.or_ else ["head"])
            fz.freeze(optax.sgd(0.1), selector).init(params)


class TestRules:
    def test_first_match_wins(self, params):
        rules = fz.rules({"**/layer_1/bias": False, "encoder": True})
        assert chosen(rules, params) == ["encoder/layer_0/bias", "encoder/layer_0/kernel", "encoder/layer_1/kernel"]
        assert chosen(fz.rules({"head": False}, default=True), params) == ENCODER

    def test_selectors_as_keys(self, params):
        rules = fz.rules({fz.where(lambda path, leaf: leaf.ndim == 1): False, ("encoder", "head"): True})
        assert chosen(rules, params) == [ENCODER[1], ENCODER[3], HEAD[1]]

    def test_a_rule_that_may_match_nothing_is_not_shadowed(self, params):
        nothing = fz.where(lambda path, leaf: False)
        assert chosen(fz.rules({"encoder": True, nothing: False}), params) == ENCODER

    def test_is_a_selector(self, params):
        assert chosen(~fz.rules({"encoder": True}), params) == HEAD
        assert chosen(fz.rules({"encoder": True}) | "head/bias", params) == [*ENCODER, "head/bias"]


def is_bias(path, leaf):
    return leaf.ndim == 1


SELECTORS = {
    "fz.path('encoder/**')": lambda: fz.path("encoder/**"),
    "fz.path('a', 'b')": lambda: fz.path("a", "b"),
    "fz.all_except('head')": lambda: fz.all_except("head"),
    "fz.path('a')": lambda: fz.path("a"),
    "fz.regex('a')": lambda: fz.regex("a"),
    "fz.where(is_bias)": lambda: fz.where(is_bias),
    "~fz.path('a')": lambda: ~fz.path("a"),
    "fz.path('a') | fz.path('b') | fz.path('c')": lambda: fz.path("a") | "b" | "c",
    "fz.path('a') | (fz.path('b') & fz.path('c'))": lambda: fz.path("a") | (fz.path("b") & "c"),
    "~(fz.path('a') | fz.path('b'))": lambda: ~(fz.path("a") | "b"),
    "fz.path('a') | (fz.path('b') | fz.path('c'))": lambda: fz.path("a") | (fz.path("b") | "c"),
    "fz.rules({'a': True, fz.regex('b'): False})": lambda: fz.rules({"a": True, fz.regex("b"): False}),
    "fz.rules({'a': False}, default=True)": lambda: fz.rules({"a": False}, default=True),
    "fz.rules({'a': True}, default=fz.rows([0]))": lambda: fz.rules({"a": True}, default=fz.rows([0])),
    "fz.rows(slice(0, 4, None))": lambda: fz.rows(slice(0, 4)),
    "fz.rows([1, 2], axis=1)": lambda: ~~fz.rows([1, 2], axis=1),
    "~fz.rows(-1)": lambda: ~fz.rows(-1),
}


@pytest.mark.parametrize("text", SELECTORS)
def test_selectors_are_values_whose_repr_reads_like_the_call(text):
    a, b = SELECTORS[text](), SELECTORS[text]()
    assert repr(a) == text
    assert a == b == eval(text, {"fz": fz, "is_bias": is_bias})
    assert hash(a) == hash(b)
    assert a not in [make() for other, make in SELECTORS.items() if other != text]
