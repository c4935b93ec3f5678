"""Which value holds, and who said so."""

from typing import Any

import pytest

from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.model.synthetic import PRESETS
from xinfer.sampling import SamplingParams
from xinfer.settings import resolve_settings

CONFIG = Qwen2Config.from_json({**PRESETS["gqa"].config_json(), "eos_token_id": 7})


def generation(**values: object) -> GenerationConfig:
    return GenerationConfig.from_json(values)


def test_the_request_comes_first() -> None:
    settings = resolve_settings(SamplingParams(temperature=0.3), generation(do_sample=True, temperature=0.7), CONFIG)
    assert settings.params.temperature == 0.3
    assert settings.sources["temperature"].source == "request"


def test_then_the_checkpoint_then_what_changes_nothing() -> None:
    settings = resolve_settings(SamplingParams(), generation(do_sample=True, temperature=0.7, top_k=20), CONFIG)
    assert (settings.params.temperature, settings.params.top_k, settings.params.top_p) == (0.7, 20, 1.0)
    assert settings.sources["top_k"].source == "generation_config.json"
    assert settings.sources["top_p"].source == "default"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (None, "default"),
        ({"temperature": 0.7}, "generation_config.json (do_sample is absent)"),
        ({"temperature": 0.7, "do_sample": False}, "generation_config.json (do_sample is false)"),
    ],
)
def test_without_do_sample_the_answer_is_greedy(file: dict[str, object] | None, source: str) -> None:
    settings = resolve_settings(SamplingParams(), None if file is None else generation(**file), CONFIG)
    assert settings.params.temperature == 0
    assert settings.sources["temperature"].source == source


def test_repetition_penalty_of_the_checkpoint_holds_under_greedy_too() -> None:
    settings = resolve_settings(SamplingParams(temperature=0), generation(repetition_penalty=1.1), CONFIG)
    assert settings.params.repetition_penalty == 1.1


def test_stop_ids_come_from_the_generation_config_else_the_config() -> None:
    assert resolve_settings(SamplingParams(), None, CONFIG).stop_ids == {7}
    assert resolve_settings(SamplingParams(), generation(eos_token_id=[3, 4]), CONFIG).stop_ids == {3, 4}
    both = resolve_settings(SamplingParams(stop_token_ids=(9,)), generation(eos_token_id=[3, 4]), CONFIG)
    assert both.stop_ids == {3, 4, 9}
    assert both.sources["stop_ids"].source == "generation_config.json and request"


def test_ignore_eos_leaves_only_the_requests_own() -> None:
    assert resolve_settings(SamplingParams(ignore_eos=True, stop_token_ids=(9,)), None, CONFIG).stop_ids == {9}


def test_zero_is_a_value_and_not_an_absence() -> None:
    settings = resolve_settings(
        SamplingParams(top_k=0, min_p=0.0), generation(do_sample=True, top_k=20, min_p=0.1), CONFIG
    )
    assert (settings.params.top_k, settings.params.min_p) == (0, 0.0)
    assert settings.sources["top_k"].source == "request"


def test_max_tokens_may_come_from_the_checkpoint() -> None:
    assert resolve_settings(SamplingParams(), generation(max_new_tokens=33), CONFIG).params.max_tokens == 33
    assert resolve_settings(SamplingParams(), None, CONFIG).params.max_tokens is None


@pytest.mark.parametrize(
    ("asked", "file", "why"),
    [
        ({"speculate": 0}, {"repetition_penalty": 1.05}, None),
        ({}, {}, None),
        (
            {},
            {"repetition_penalty": 1.05},
            "repetition_penalty is 1.05 (generation_config.json), and would",
        ),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.05}, None),
        ({}, {"do_sample": True, "temperature": 0.7}, "temperature is 0.7 (generation_config.json)"),
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty is 0.5 (request)"),
        ({"logprobs": 0}, {}, "logprobs are asked for"),
        ({"logit_bias": {3: 1.0}}, {}, "a logit_bias is given"),
    ],
)
def test_why_nothing_is_guessed(asked: dict[str, Any], file: dict[str, Any], why: str | None) -> None:
    settings = resolve_settings(SamplingParams(**{"speculate": 7, **asked}), generation(**file), CONFIG)
    found = settings.why_no_guesses(on_cpu=False)
    assert (found or "").startswith(why or "")
    assert (found is None) == (why is None)
    on_cpu = settings.why_no_guesses(on_cpu=True)
    assert (on_cpu is not None) == (settings.params.speculate > 0)
