"""The engine on a model whose every next token is known: the sum of the sequence so far, modulo the vocabulary."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer import engine as engine_module
from xinfer.engine import Engine, Session, Timing
from xinfer.errors import ContextLengthError, NumericalError, RequestError
from xinfer.sampling import Sampler, SamplingParams

VOCAB = 50


class SumCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        assert length <= len(self.ids)
        del self.ids[length:]


class SumModel:
    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.fail_at: int | None = None
        self.poison_at: int | None = None

    def make_cache(self, capacity: int) -> SumCache:
        return SumCache(capacity)

    def forward(self, tokens: NDArray[np.int64], cache: SumCache, *, last_only: bool = False) -> NDArray[np.float32]:
        assert last_only
        assert cache.length + len(tokens) <= cache.capacity
        self.calls.append(tokens.tolist())
        cache.ids.extend(tokens.tolist())
        if self.fail_at == cache.length:
            raise KeyboardInterrupt
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, sum(cache.ids) % VOCAB] = 1.0
        if self.poison_at == cache.length:
            logits[0, 3] = np.nan
        return logits


def run(session: Session[SumCache], prompt: Sequence[int], **options: object) -> list[tuple[int, str | None]]:
    sampler = Sampler(SamplingParams(temperature=0), prompt_ids=prompt, vocab_size=VOCAB)
    return [
        (step.sampled.token, step.finish_reason)
        for step in session.generate(prompt, sampler, **options)  # type: ignore[arg-type]
    ]


@pytest.fixture
def model() -> SumModel:
    return SumModel()


@pytest.fixture
def session(model: SumModel) -> Session[SumCache]:
    return Engine(model, context=20).session()


def test_every_token_is_the_sum_of_what_came_before(session: Session[SumCache]) -> None:
    assert run(session, [1, 2], max_tokens=4) == [(3, None), (6, None), (12, None), (24, "length")]


def test_a_stop_id_ends_the_answer_and_is_part_of_it(session: Session[SumCache]) -> None:
    assert run(session, [1, 2], max_tokens=9, stop_ids={12}) == [(3, None), (6, None), (12, "stop")]


def test_a_stop_id_at_the_last_token_is_a_stop(session: Session[SumCache]) -> None:
    assert run(session, [1, 2], max_tokens=3, stop_ids={12})[-1] == (12, "stop")


def test_the_contexts_end_is_said_and_never_overrun(session: Session[SumCache]) -> None:
    steps = run(session, [1] * 15)
    assert [reason for _, reason in steps] == [None] * 4 + ["context"]
    assert len(session.ids) == 19  # the last token was never fed back


def test_max_tokens_wins_over_the_contexts_end_when_both_come_at_once(session: Session[SumCache]) -> None:
    assert run(session, [1] * 15, max_tokens=5)[-1][1] == "length"


@pytest.mark.parametrize("length", [20, 21, 500])
def test_a_prompt_without_room_for_an_answer_is_refused(session: Session[SumCache], length: int) -> None:
    with pytest.raises(ContextLengthError, match=f"{length} tokens and the context holds 20"):
        run(session, [1] * length)


def test_an_empty_prompt_is_refused(session: Session[SumCache]) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        run(session, [])


def test_what_the_cache_holds_is_not_computed_again(model: SumModel, session: Session[SumCache]) -> None:
    run(session, [1, 2], max_tokens=3)  # cache: 1 2 3 6
    model.calls.clear()
    timing = Timing()
    assert run(session, [1, 2, 3, 6, 12, 5], max_tokens=1, timing=timing) == [(29, "length")]
    assert model.calls == [[12, 5]]
    assert (timing.prompt_tokens, timing.cached_tokens, timing.generated_tokens) == (6, 4, 1)


def test_a_different_prompt_keeps_only_what_is_common(model: SumModel, session: Session[SumCache]) -> None:
    run(session, [1, 2], max_tokens=3)
    model.calls.clear()
    assert run(session, [1, 9], max_tokens=1) == [(10, "length")]
    assert model.calls == [[9]]


def test_the_same_prompt_again_computes_its_last_token_only(model: SumModel, session: Session[SumCache]) -> None:
    first = run(session, [4, 5, 6], max_tokens=2)
    model.calls.clear()
    assert run(session, [4, 5, 6], max_tokens=2) == first
    assert model.calls[0] == [6]


def test_reset_forgets(model: SumModel, session: Session[SumCache]) -> None:
    run(session, [1, 2], max_tokens=3)
    session.reset()
    model.calls.clear()
    run(session, [1, 2], max_tokens=1)
    assert model.calls == [[1, 2]]


@pytest.mark.parametrize("fail_at", [1, 3, 5, 6, 8])
def test_an_interrupted_session_answers_the_next_time_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch, model: SumModel, session: Session[SumCache], fail_at: int
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 1 if fail_at < 5 else 5)
    expected = run(Engine(SumModel(), context=20).session(), [1, 2, 3, 4, 5], max_tokens=6)
    model.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        run(session, [1, 2, 3, 4, 5], max_tokens=6)
    model.fail_at = None
    assert run(session, [1, 2, 3, 4, 5], max_tokens=6) == expected


def test_closing_waits_for_one_forward_and_not_for_all_that_want_to_run(model: SumModel) -> None:
    engine = Engine(model, context=20)
    closing = threading.Thread(target=engine.close)
    with engine._turn():
        closing.start()
        until = time.monotonic() + 10
        while not engine._closed:  # it waits for this turn, and no other may begin
            assert time.monotonic() < until
            time.sleep(0.001)
        assert closing.is_alive()
    with pytest.raises(RequestError, match="closed"), engine._turn():
        pass
    closing.join()


def test_long_prompts_go_in_chunks_and_report_progress(monkeypatch: pytest.MonkeyPatch, model: SumModel) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 4)
    seen: list[tuple[int, int]] = []
    session = Engine(model, context=20).session()
    run(session, list(range(10)), max_tokens=1, on_prefill=lambda done, total: seen.append((done, total)))
    assert model.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]  # from before the first, which may take long


def test_nan_in_the_logits_is_an_error_that_names_the_position(model: SumModel, session: Session[SumCache]) -> None:
    model.poison_at = 4
    with pytest.raises(NumericalError, match="4"):
        run(session, [1, 2], max_tokens=5)


def test_an_answer_left_half_way_leaves_the_session_usable(session: Session[SumCache]) -> None:
    sampler = Sampler(SamplingParams(temperature=0), prompt_ids=[1, 2], vocab_size=VOCAB)
    steps = session.generate([1, 2], sampler)
    next(steps)
    next(steps)
    del steps
    assert run(session, [1, 2], max_tokens=3) == [(3, None), (6, None), (12, "length")]
