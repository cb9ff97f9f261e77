"""Settings: flag, then variable, then default, and every mistake named at once."""

import argparse
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.hooks import settings as module
from smg_grpc_servicer.hooks.settings import (
    ConfigurationError,
    Setting,
    Settings,
    Source,
    add_flags,
    choice,
    flag_value,
    non_negative_int,
    port,
    positive_int,
    positive_seconds,
    resolve,
    seconds,
    text,
)

IMPL = Setting(
    "impl",
    "SMG_IMPL",
    "python",
    choice("python", "rust"),
    "python or rust",
    flag="--servicer-impl",
    help="What serves.",
)
DRAIN = Setting(
    "drain_secs", "SMG_DRAIN_SECS", 5.0, seconds, "a number of seconds, 0 or more", replaced=("SMG_OLD", "SMG_OLDER")
)
LIMIT: Setting[int | None] = Setting("limit", "SMG_LIMIT", None, positive_int, "an integer above 0", flag="--limit")
ALL = (IMPL, DRAIN, LIMIT)


def namespace(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**values)


def lines(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve(*args, **kwargs)
    return caught.value.lines


def test_a_flag_beats_the_variable_which_beats_the_default() -> None:
    environ = {"SMG_IMPL": "rust", "SMG_DRAIN_SECS": "2.5"}
    found = resolve(ALL, namespace(servicer_impl="Python"), environ)
    assert dict(found) == {"impl": "python", "drain_secs": 2.5, "limit": None}
    assert [found.source(name) for name in found] == [Source.FLAG, Source.ENVIRONMENT, Source.DEFAULT]
    assert [found.given(name) for name in found] == [True, True, False]


def test_without_a_namespace_the_environment_counts() -> None:
    assert resolve(ALL, None, {"SMG_IMPL": "rust"})["impl"] == "rust"


def test_a_flag_the_parser_does_not_know_counts_as_not_given() -> None:
    assert resolve(ALL, namespace(other=1), {}).source("limit") is Source.DEFAULT


def test_an_empty_variable_counts_as_unset() -> None:
    assert resolve([LIMIT], None, {"SMG_LIMIT": ""}).source("limit") is Source.DEFAULT


def test_an_empty_flag_is_a_value() -> None:
    assert lines([LIMIT], namespace(limit=""), {}) == (
        "--limit (SMG_LIMIT): '' is not accepted; expected an integer above 0",
    )


def test_a_namespace_value_that_is_no_text_is_parsed_too() -> None:
    assert resolve([LIMIT], namespace(limit=7), {})["limit"] == 7
    assert lines([LIMIT], namespace(limit=False), {})


def test_every_problem_is_named_with_flag_variable_value_and_what_is_accepted() -> None:
    environ = {"SMG_DRAIN_SECS": "soon", "SMG_LIMIT": "0"}
    assert lines(ALL, namespace(servicer_impl="go"), environ) == (
        "--servicer-impl (SMG_IMPL): 'go' is not accepted; expected python or rust",
        "SMG_DRAIN_SECS: 'soon' is not accepted; expected a number of seconds, 0 or more",
        "--limit (SMG_LIMIT): '0' is not accepted; expected an integer above 0",
    )


def test_a_configuration_error_ends_with_code_2_and_says_all_lines() -> None:
    error = ConfigurationError(["one", "two"])
    assert error.exit_code == 2
    assert str(error) == "one\ntwo"


def test_a_cross_check_adds_its_problem() -> None:
    def needs_rust(found: Settings) -> str | None:
        return "--limit needs rust" if found["limit"] and found["impl"] != "rust" else None

    assert lines(ALL, namespace(limit="3"), {}, checks=[needs_rust]) == ("--limit needs rust",)
    assert resolve(ALL, namespace(limit="3", servicer_impl="rust"), {}, checks=[needs_rust])["limit"] == 3


def test_a_cross_check_of_a_value_that_is_refused_already_is_left_out() -> None:
    def of_limit(found: Settings) -> str | None:
        return f"limit is {found['limit']}"

    def of_impl(found: Settings) -> str | None:
        return f"impl is {found['impl']}"

    assert lines(ALL, namespace(limit="x"), {}, checks=[of_limit, of_impl])[1:] == ("impl is python",)


def test_a_cross_check_with_a_wrong_name_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        resolve(ALL, None, {}, checks=[lambda found: found["no such setting"]])


def test_a_deprecated_variable_works_and_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_replaced.cache_clear()
    with caplog.at_level(logging.WARNING):
        first = resolve(ALL, None, {"SMG_OLD": "1"})
        resolve(ALL, None, {"SMG_OLD": "1"})
    assert (first["drain_secs"], first.source("drain_secs")) == (1.0, Source.ENVIRONMENT)
    assert [record.getMessage() for record in caplog.records] == ["SMG_OLD is deprecated; use SMG_DRAIN_SECS"]


def test_a_deprecated_variable_yields_to_the_new_one() -> None:
    assert resolve(ALL, None, {"SMG_OLDER": "1", "SMG_OLD": "2", "SMG_DRAIN_SECS": "3"})["drain_secs"] == 3.0
    assert resolve(ALL, None, {"SMG_OLDER": "1", "SMG_OLD": "2"})["drain_secs"] == 2.0


def test_an_error_names_the_deprecated_variable_that_holds_the_value() -> None:
    assert lines(ALL, None, {"SMG_OLD": "x"})[0].startswith("SMG_OLD: 'x'")


# --- flags ---------------------------------------------------------------------------------------------------------


def test_flags_are_added_raw_and_resolved_later() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ALL, "serving")
    assert vars(parser.parse_args(["--servicer-impl", "go"])) == {"servicer_impl": "go", "limit": None}


def test_help_tells_what_is_accepted_the_default_and_the_variable() -> None:
    parser = argparse.ArgumentParser()
    percent = Setting("share", "SMG_SHARE", 10, positive_int, "a share in %", flag="--share")
    add_flags(parser, [*ALL, percent], "serving")
    shown = " ".join(parser.format_help().split())
    assert "serving:" in shown
    assert "--servicer-impl IMPL What serves. Accepts python or rust. Default: python. Variable: SMG_IMPL." in shown
    assert "Default: unset. Variable: SMG_LIMIT." in shown
    assert "Accepts a share in %." in shown


def test_a_flag_the_parser_has_already_is_left_alone() -> None:
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    parser.add_argument("--limit", type=int, default=3)
    add_flags(parser, [LIMIT], "serving")
    add_flags(parser, [IMPL], "serving")
    add_flags(parser, [IMPL], "serving again")
    assert parser.parse_args([]).limit == 3
    assert parser.format_help().count("serving") == 1


# --- parsers -------------------------------------------------------------------------------------------------------

PARSERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool]]] = {
    "positive_int": (positive_int, lambda v: type(v) is int and 1 <= v < 2**63),
    "non_negative_int": (non_negative_int, lambda v: type(v) is int and 0 <= v < 2**63),
    "port": (port, lambda v: type(v) is int and 0 <= v <= 65535),
    "seconds": (seconds, lambda v: type(v) is float and math.isfinite(v) and v >= 0),
    "positive_seconds": (positive_seconds, lambda v: type(v) is float and math.isfinite(v) and v > 0),
    "choice": (choice("python", "Rust"), lambda v: v in ("python", "Rust")),
    "flag_value": (flag_value, lambda v: type(v) is bool),
    "text": (text, lambda v: type(v) is str),
}

NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text("0123456789+-_. eE\n"),
    st.sampled_from(["nan", "inf", "1e999"]),
)


@pytest.mark.parametrize("name", PARSERS)
@given(given_text=st.one_of(st.text(), NUMBERS, st.sampled_from(["RUST", "Yes", "oFF", "9" * 5000])))
def test_any_text_is_a_valid_value_or_a_configuration_error(name: str, given_text: str) -> None:
    parse, valid = PARSERS[name]
    setting = Setting(name, "SMG_X", None, parse, "something else", flag="--x")
    try:
        found = resolve([setting], namespace(x=given_text), {})
    except ConfigurationError as error:
        problems = error.lines
    else:
        assert valid(found[name])
        return
    assert problems == (f"--x (SMG_X): {given_text!r} is not accepted; expected something else",)


@pytest.mark.parametrize(
    ("parse", "accepted"),
    [
        (positive_int, {"1": 1, "+7": 7, "007": 7, str(2**63 - 1): 2**63 - 1}),
        (non_negative_int, {"0": 0, "-0": 0}),
        (port, {"0": 0, "65535": 65535}),
        (seconds, {"0": 0.0, "1.5": 1.5, "1e3": 1000.0, "-0": 0.0}),
        (positive_seconds, {".5": 0.5}),
        (choice("python", "Rust"), {"PYTHON": "python", "rust": "Rust"}),
        (flag_value, {"1": True, "TRUE": True, "yes": True, "On": True, "0": False, "no": False, "OFF": False}),
        (text, {"": "", " a ": " a "}),
    ],
)
def test_parsers_accept(parse: Callable[[str], Any], accepted: dict[str, Any]) -> None:
    assert {given_text: parse(given_text) for given_text in accepted} == accepted


@pytest.mark.parametrize(
    ("parse", "refused"),
    [
        (positive_int, ["0", "-1", "1.0", "1_0", "", " 1", "\u0661", str(2**63), "1\n"]),
        (non_negative_int, ["-1", "0x1"]),
        (port, ["65536", "-1", "http"]),
        (seconds, ["nan", "inf", "-1", "1e999", "1_0", "", "5s", "\u0661"]),
        (positive_seconds, ["0", "0.0", "-0"]),
        (choice("python", "rust"), ["", "go", "pythonrust"]),
        (flag_value, ["", "2", "t", "enabled"]),
    ],
)
def test_parsers_refuse(parse: Callable[[str], Any], refused: list[str]) -> None:
    for given_text in refused:
        with pytest.raises(ValueError):
            parse(given_text)
