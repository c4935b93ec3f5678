"""Which sampling values hold for a request, and which file or argument each of them came from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.sampling import SamplingParams

REQUEST = "request"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"
DEFAULT = "default"

# What a value does when nobody gives it: nothing.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None}
_GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_FILE_KEYS = {"max_tokens": "max_new_tokens"}  # ours: the file's own key, where they differ


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and its source: "request", "generation_config.json", "config.json" or "default"."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a request will run with."""

    params: SamplingParams  # no None left, but for max_tokens and seed
    stop_ids: frozenset[int]
    sources: dict[str, Setting]

    def why_no_guesses(self, *, on_cpu: bool) -> str | None:
        """Why nothing can be guessed where `speculate` asks for it; None where it can, or it does not."""
        params = self.params
        if not params.speculate:
            return None
        if on_cpu:
            return "the CPU makes one token at a time"
        if params.logprobs is not None:
            return "logprobs are asked for"
        if params.logit_bias:
            return "a logit_bias is given"
        for name, neutral in _GREEDY.items():
            value, source = getattr(params, name), self.sources[name].source
            if value != neutral:
                return f"{name} is {value:g} ({source}), and would have to be {neutral:g}"
        return None


def resolve_settings(params: SamplingParams, generation: GenerationConfig | None, config: Qwen2Config) -> Settings:
    """The request's own values first, then the checkpoint's generation_config.json, then values that change nothing.

    A checkpoint that does not say `do_sample: true` is decoded greedily unless the request gives a temperature, as
    transformers does.
    """
    values = {name: _setting(name, params, generation) for name in _NEUTRAL}
    if params.temperature is None:
        values["temperature"] = _temperature(generation)
    stop_ids = _stop_ids(params, generation, config)
    sources = values | {
        name: Setting(getattr(params, name), REQUEST if getattr(params, name) else DEFAULT)
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "seed")
    }
    if params.seed is not None:
        sources["seed"] = Setting(params.seed, REQUEST)
    sources["stop_ids"] = stop_ids
    resolved = dataclasses.replace(params, **{name: setting.value for name, setting in values.items()})
    return Settings(params=resolved, stop_ids=frozenset(stop_ids.value), sources=sources)


def _setting(name: str, params: SamplingParams, generation: GenerationConfig | None) -> Setting:
    value = getattr(params, name)
    if value is not None:
        return Setting(value, REQUEST)
    value = getattr(generation, _FILE_KEYS.get(name, name), None)
    if value is not None:
        return Setting(value, GENERATION_CONFIG)
    return Setting(_NEUTRAL[name], DEFAULT)


def _temperature(generation: GenerationConfig | None) -> Setting:
    if generation is None:
        return Setting(0.0, DEFAULT)
    if not generation.do_sample:
        return Setting(
            0.0, f"{GENERATION_CONFIG} (do_sample is {'false' if generation.do_sample is False else 'absent'})"
        )
    if generation.temperature is None:
        return Setting(_NEUTRAL["temperature"], DEFAULT)
    return Setting(generation.temperature, GENERATION_CONFIG)


def _stop_ids(params: SamplingParams, generation: GenerationConfig | None, config: Qwen2Config) -> Setting:
    if params.ignore_eos:
        return Setting(tuple(sorted(params.stop_token_ids)), REQUEST)
    if generation is not None and generation.eos_token_ids:
        ids, source = generation.eos_token_ids, GENERATION_CONFIG
    else:
        ids, source = config.eos_token_ids, CONFIG
    if params.stop_token_ids:
        source += " and request"
    return Setting(tuple(sorted({*ids, *params.stop_token_ids})), source)
