"""Where the Rust server of smg 1.13.0 answers otherwise than the Python implementation, and the tests that show it.

Each topic is a row of the README's table of differences (test_differences.py compares the two). A listed test must
fail on the Rust worker: one that passes is a difference that is gone.
"""

from __future__ import annotations

from typing import NamedTuple

_REFUSED = "test_a_bad_value_is_refused_by_name_and_value"


class Difference(NamedTuple):
    """A topic, and (test function, part of the test's id) of what shows it."""

    topic: str
    shown_by: tuple[tuple[str, str], ...]
    runs: bool = True
    """Whether the tests can be run on the Rust worker: one that would keep it busy for minutes is left out."""


DIFFERENCES = (
    Difference(
        "Values that only the engine core's guard checks",
        (
            (_REFUSED, "'prompt': []"),
            (_REFUSED, "'prompt': [1, 5000, 2]"),
            (_REFUSED, "'prompt': [4294967295]"),
            (_REFUSED, "'temperature': 2.5"),
            (_REFUSED, "'max_tokens': 1000000"),
            (_REFUSED, "'stop_token_ids'"),
            (_REFUSED, "'logit_bias': {2048"),
            (_REFUSED, "'logit_bias': {1:"),
            (_REFUSED, "'json_schema'"),
            (_REFUSED, "'grammar'"),
            (_REFUSED, "'structural_tag'"),
            (_REFUSED, "'regex'"),
        ),
    ),
    Difference("A rank that is out of range", ((_REFUSED, "'data_parallel_rank': 17"),)),
    Difference("`n` without a bound", ((_REFUSED, "'n': 100000"),), runs=False),
    Difference(
        "Bad values that are dropped",
        (
            (_REFUSED, "'top_k'"),
            (_REFUSED, "'stop': ['a', '']"),
            (_REFUSED, "'logit_bias': {-1"),
            (_REFUSED, "'json_object': False"),
            (_REFUSED, "'choice'"),
        ),
    ),
    Difference(
        "`truncate_prompt_tokens`",
        (
            (_REFUSED, "'truncate_prompt_tokens'"),
            ("test_a_prompt_is_truncated_to_its_last_tokens", ""),
            ("test_truncation_to_the_context_leaves_room_for_the_output", ""),
        ),
    ),
    Difference(
        "Text prompts",
        (
            (_REFUSED, "'prompt': ''"),
            ("test_a_text_prompt_is_tokenized_by_the_worker", ""),
            ("test_a_text_is_truncated_to_its_last_tokens_however_long_it_is", ""),
        ),
    ),
    Difference("Media", (("test_media_is_refused_not_dropped", ""),)),
    Difference(
        "grpc.health.v1",
        (
            ("test_the_engine_is_healthy_by_every_name", ""),
            ("test_an_unknown_service_is_not_found_and_its_watch_says_so", ""),
        ),
    ),
    Difference("`GetServerInfo.last_receive_timestamp`", (("test_server_facts_are_complete", ""),)),
    Difference("`GetLoads.dp_rank`", (("test_loads_name_every_rank_and_can_be_asked_for_one", ""),)),
    Difference("Profiling", (("test_profile_options_are_refused", ""),)),
    Difference(
        "Ranked logprobs",
        (
            ("test_a_sampled_token_outside_the_best_is_not_among_them", ""),
            ("test_the_same_request_has_the_same_answer", "[prompt logprobs"),
        ),
    ),
    Difference(
        "Prompt logprobs",
        (("test_prompt_logprobs_come_once", "rust-1-True"), ("test_prompt_logprobs_come_once", "rust-2")),
    ),
    Difference("`SubscribeKvEvents`", (("test_kv_events_are_not_served_yet", ""),)),
)


def difference(function: str, test_id: str) -> Difference | None:
    """The difference that a test on the Rust worker shows, if it is listed."""
    for listed in DIFFERENCES:
        for name, part in listed.shown_by:
            if name == function and part in test_id:
                return listed
    return None
