"""Text in, text out, on synthetic checkpoints: compared with the pieces that LLM is made of, used by hand."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xinfer import LLM, SamplingParams
from xinfer.errors import (
    ChatTemplateError,
    ContextLengthError,
    DeviceError,
    ModelNotFoundError,
    NumericalError,
    RequestError,
)
from xinfer.model.reference import ReferenceModel
from xinfer.model.synthetic import PRESETS, write_checkpoint
from xinfer.model.weights import ModelWeights

GREEDY = SamplingParams(temperature=0, repetition_penalty=1.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llm") / "gqa", PRESETS["gqa"], seed=11)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as opened:
        yield opened


def greedy_by_hand(folder: Path, prompt_ids: list[int], n: int, n_tokens: int) -> list[int]:
    """Full forwards, no cache, argmax over the ids that the tokenizer has."""
    with ModelWeights.open(folder) as weights:
        model = ReferenceModel(weights)
        ids = list(prompt_ids)
        for _ in range(n):
            ids.append(int(model.forward(ids, last_only=True)[0, :n_tokens].argmax()))
    return ids[len(prompt_ids) :]


def test_greedy_equals_full_forwards_without_a_cache(llm: LLM, folder: Path) -> None:
    answer = llm.generate("the sea", GREEDY)
    expected = greedy_by_hand(folder, list(answer.prompt_token_ids), 24, llm.checkpoint.tokenizer.size)
    assert list(answer.token_ids) == expected
    assert answer.text == llm.checkpoint.tokenizer.decode(expected)
    assert answer.finish_reason == "length"


def test_chunks_add_up_to_the_completion(llm: LLM) -> None:
    stream = llm.stream("one two", GREEDY, temperature=1.5, seed=3)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 23 + ["length"]
    again = llm.generate("one two", GREEDY, temperature=1.5, seed=3)
    assert (again.text, again.token_ids) == (stream.completion.text, stream.completion.token_ids)


def test_the_seed_decides(llm: LLM) -> None:
    texts = {llm.generate("x", GREEDY, temperature=2.0, seed=seed).text for seed in range(5)}
    assert len(texts) == 5
    unseeded = llm.generate("x", GREEDY, temperature=2.0)
    assert llm.generate("x", GREEDY, temperature=2.0, seed=unseeded.stats.seed).token_ids == unseeded.token_ids


def test_a_stop_string_across_tokens_ends_the_text_before_it(llm: LLM) -> None:
    text = llm.generate("the sea", GREEDY).text
    stop = text[5:9]
    answer = llm.generate("the sea", GREEDY, stop=[stop])
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"


def test_a_stop_string_that_is_a_special_token_stops_at_its_id(llm: LLM) -> None:
    end = llm.checkpoint.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(end) == 1
    answer = llm.generate("x", GREEDY, logit_bias={end[0]: 100.0}, stop="<|im_start|>")
    assert answer.token_ids == (end[0],)
    assert (answer.text, answer.finish_reason) == ("", "stop")


def test_the_checkpoints_stop_ids_end_an_answer(llm: LLM) -> None:
    stop = llm.checkpoint.settings().stop_ids
    answer = llm.generate("x", SamplingParams(max_tokens=5, logit_bias=dict.fromkeys(stop, 100.0)))
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == 1


def test_rows_past_the_tokenizer_are_never_sampled(llm: LLM) -> None:
    size, vocab = llm.checkpoint.tokenizer.size, llm.checkpoint.config.vocab_size
    assert size < vocab
    bias = dict.fromkeys(range(size, vocab), 100.0)
    for temperature in (0.0, 5.0):
        answer = llm.generate("x", GREEDY, logit_bias=bias, temperature=temperature, seed=1)
        assert max(answer.token_ids) < size


def test_the_contexts_end_is_a_finish_reason(folder: Path) -> None:
    with LLM(folder, context=12) as llm:
        answer = llm.generate(list(range(5, 13)), GREEDY)
        assert (len(answer.token_ids), answer.finish_reason) == (4, "context")
        with pytest.raises(ContextLengthError, match="12 tokens and the context holds 12"):
            llm.generate(list(range(12)), GREEDY)


@pytest.mark.parametrize("context", [0, 1, -5, 10**9])
def test_a_context_beyond_the_model_is_refused(folder: Path, context: int) -> None:
    with pytest.raises(RequestError, match="expected 2 to 2,048"):
        LLM(folder, context=context)


def test_two_threads_on_one_model_get_what_each_would_get_alone(llm: LLM) -> None:
    prompts = [f"number {n}" for n in range(6)]
    alone = [llm.generate(prompt, GREEDY, temperature=1.0, seed=n).token_ids for n, prompt in enumerate(prompts)]
    together: dict[int, tuple[int, ...]] = {}

    def work(n: int) -> None:
        together[n] = llm.generate(prompts[n], GREEDY, temperature=1.0, seed=n).token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[n] for n in range(len(prompts))] == alone


def test_a_conversation_equals_answers_to_the_whole_history_and_keeps_its_cache(llm: LLM) -> None:
    talk = llm.conversation(system="Answer.")
    first = talk.send("Who?", GREEDY)
    for _ in first:
        pass
    second = talk.send("Why?", GREEDY)
    for _ in second:
        pass
    history = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": first.completion.text},
        {"role": "user", "content": "Why?"},
    ]
    assert talk.messages[:-1] == history
    prompt_ids = second.completion.prompt_token_ids
    assert llm.checkpoint.tokenizer.decode(prompt_ids, skip_special_tokens=False) == llm.checkpoint.render_chat(history)
    assert llm.generate(prompt_ids, GREEDY).token_ids == second.completion.token_ids
    assert second.completion.stats.cached_tokens >= first.completion.stats.prompt_tokens


def test_a_conversation_left_half_way_keeps_what_was_read(llm: LLM) -> None:
    talk = llm.conversation()
    stream = talk.send("Who?", GREEDY)
    read = next(stream).text + next(stream).text
    assert talk.messages[-1] == {"role": "assistant", "content": read}
    for _ in talk.send("And?", GREEDY):
        pass
    assert len(talk.messages) == 4


def test_a_refused_message_leaves_the_conversation_as_it_was(folder: Path) -> None:
    with LLM(folder, context=128) as llm:
        talk = llm.conversation()
        for _ in talk.send("a", GREEDY, max_tokens=3):
            pass
        before = list(talk.messages)
        with pytest.raises(ContextLengthError):
            talk.send("word " * 200, GREEDY)
        assert talk.messages == before
        for _ in talk.send("b", GREEDY, max_tokens=3):
            pass
        talk.reset()
        assert talk.messages == []


def test_logprobs_are_the_models_own(llm: LLM, folder: Path) -> None:
    answer = llm.generate("x", GREEDY, max_tokens=1, temperature=0.3, logprobs=3, seed=0)
    with ModelWeights.open(folder) as weights:
        logits = ReferenceModel(weights).forward(list(answer.prompt_token_ids), last_only=True)[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    sampled = answer.sampled[0]
    assert sampled.logprob == pytest.approx(logprobs[sampled.token], abs=1e-5)
    valid = logprobs[: llm.checkpoint.tokenizer.size]
    assert [token for token, _ in sampled.top] == np.argsort(-valid, kind="stable")[:3].tolist()


def test_a_nan_in_the_weights_is_an_error_and_not_a_token(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].copy()
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with LLM(broken) as llm, pytest.raises(NumericalError, match="NaN"):
        llm.generate("x", GREEDY)


def test_a_checkpoint_without_a_chat_template_can_still_generate(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer_config.json":
            (plain / file.name).write_bytes(file.read_bytes())
    with LLM(plain) as llm:
        assert llm.generate("x", GREEDY).text
        with pytest.raises(ChatTemplateError, match="no chat template"):
            llm.chat("hello")


def test_unknown_values_and_devices_are_named(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match="temprature"):
        llm.generate("x", temprature=1.0)
    with pytest.raises(DeviceError, match="'quantum'"):
        LLM(folder, device="quantum")
    with pytest.raises(RequestError, match="token id 384"):
        llm.generate([1, 384])


def test_progress_reports_loading_to_the_end(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with LLM(folder, progress=lambda stage, done, total: seen.append((stage, done, total))) as llm:
        llm.generate("x", GREEDY, max_tokens=1)
    assert {stage for stage, _, _ in seen} == {"load", "prefill"}
    for stage in ("load", "prefill"):
        done = [(done, total) for name, done, total in seen if name == stage]
        assert done[-1][0] == done[-1][1]
        assert done == sorted(done)


def test_an_answer_cannot_go_on_once_another_has_begun(llm: LLM) -> None:
    talk = llm.conversation()
    first = talk.send("Who?", GREEDY)
    next(first)
    second = talk.send("Why?", GREEDY)
    with pytest.raises(RequestError, match="another answer has begun"):
        next(first)
    for _ in second:
        pass
    assert [message["content"] for message in talk.messages if message["role"] == "user"] == ["Who?", "Why?"]
    assert llm.chat(talk.messages[:-1], GREEDY).token_ids == second.completion.token_ids


def test_reset_ends_the_answer_under_way(llm: LLM) -> None:
    talk = llm.conversation()
    stream = talk.send("Who?", GREEDY)
    next(stream)
    talk.reset()
    with pytest.raises(RequestError, match="another answer has begun"):
        next(stream)
    assert talk.messages == []


def test_after_close_everything_says_so(folder: Path) -> None:
    llm = LLM(folder)
    talk, stream = llm.conversation(), llm.stream("x", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate("x"),
        lambda: llm.chat("x"),
        lambda: next(stream),
        llm.conversation,
        llm.chosen,
        lambda: list(talk.send("x")),
    ):
        with pytest.raises(RequestError, match="the model is closed"):
            use()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"exact": "no"}, "exact='no'; expected True or False"),
        ({"canary": 1}, "canary=1; expected True or False"),
        ({"options": {"mode": "auto"}}, r"options=\{'mode': 'auto'\}; expected ModelOptions"),
        ({"device": None}, "device=None; expected text: auto, cpu"),
        ({"device": b"cpu"}, "device=b'cpu'; expected text: auto, cpu"),
        ({"progress": 5}, r"progress=5; expected a function of \(stage, done, total\)"),
        ({"vram_budget": "8GB"}, "vram_budget='8GB'; expected a whole number of bytes"),
        ({"vram_budget": 8e9}, r"vram_budget=8000000000\.0; expected a whole number of bytes"),
        ({"vram_budget": True}, "vram_budget=True; expected a whole number of bytes"),
        ({"vram_budget": float("nan")}, "vram_budget=nan; expected a whole number of bytes"),
        ({"mode": ["auto"]}, r"mode=\['auto'\]; expected one of auto"),
    ],
)
def test_options_of_another_type_are_refused(folder: Path, option: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        LLM(folder, **{"device": "cpu", **option})


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about forks with threads
def test_a_forked_child_is_told_and_does_not_wait_for_ever(llm: LLM) -> None:
    with llm._engine._lock:  # as when another thread is in a forward
        child = os.fork()
        if child == 0:
            try:
                llm.generate("x", GREEDY)
            except RequestError as error:
                os._exit(7 if "fork" in str(error) else 8)
            finally:
                os._exit(9)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 7


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of Python 3.12, about forks with threads
def test_a_forked_child_may_leave_the_model_behind(folder: Path) -> None:
    """All belongs to the parent: what the child was doing, leaving, is not replaced by an error."""
    with LLM(folder, device="cpu") as own, own._engine._lock:
        child = os.fork()
        if child == 0:
            try:
                own.__exit__(None, None, None)
                own.close()
            except BaseException:
                os._exit(8)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert own._engine._closed


@pytest.mark.parametrize(
    "prompt", [123, None, object(), [None], [[1]], ["a"], [1.5], [float("nan")], [True], {1: 2}, b"hi", np.ones((2, 2))]
)
def test_what_is_neither_text_nor_ids_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="expected text"):
        llm.generate(prompt, GREEDY)


def test_ids_may_be_an_array(llm: LLM) -> None:
    assert llm.generate(np.array([5, 6, 7]), GREEDY).prompt_token_ids == (5, 6, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", ["5", 5.0, True])
def test_a_context_is_a_whole_number(folder: Path, context: Any) -> None:
    with pytest.raises(RequestError, match="whole number"):
        LLM(folder, context=context)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, "x", 3])
def test_params_are_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("x", params)


@pytest.mark.parametrize("model", [1, b"x", 2.5])
def test_a_model_is_named_in_text(model: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="as text"):
        LLM(model)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 10**400},
        {"top_p": 10**400},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {10**30: 1.0}},
        {"seed": 10**5000},
        {"stop": "\ud800"},
    ],
)
def test_numbers_and_texts_beyond_reason_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**values)


def test_params_with_a_bias_can_be_hashed_and_compared() -> None:
    biased = [SamplingParams(logit_bias={1: 2.0}) for _ in range(2)]
    assert len({*biased, SamplingParams()}) == 2
