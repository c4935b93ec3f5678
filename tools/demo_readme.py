"""What the demo model's README says: the script that trains the model writes it from what it did and measured."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from demo_corpus import HELD_OUT, PACKAGES, TEST_PLAYS, VALIDATION_PLAYS
from demo_training import CONTEXT, Run, mean_loss


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Loss of the saved model on the test plays, and what follows from it."""

    text: str
    tokens: int
    windows: list[tuple[float, int]]  # (summed loss in nats, predictions)

    def figures(self) -> dict[str, float]:
        """Means a token, and a byte and a word, which can be compared between tokenizers."""
        loss = mean_loss(self.windows)
        total = loss * self.tokens  # the first token of each window counts as the mean
        return {
            "mean_nll": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": total / math.log(2) / len(self.text.encode()),
            "word_perplexity": math.exp(total / len(self.text.split())),
        }

    def to_json(self) -> str:
        """The figures, and the losses window by window, so that a part can be checked."""
        windows = [{"nll_sum": loss, "predictions": n} for loss, n in self.windows]
        facts = {"plays": list(TEST_PLAYS), "context": CONTEXT, "tokens": self.tokens}
        return json.dumps({**facts, **self.figures(), "windows": windows}, indent=1) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What the README tells."""

    student: Run
    teachers: Sequence[Run]
    held_out: HeldOut
    pass_tokens: int
    vocabulary: int
    plays: int
    device: str
    samples: Sequence[tuple[str, str]]

    def to_markdown(self) -> str:
        """The checkpoint's README."""
        return "\n\n".join([*self._what(), *self._text(), *self._how(), *self._scores(), *self._samples()]) + "\n"

    def _what(self) -> Iterator[str]:
        r = self.student.recipe
        yield "# The demo model"
        yield _fill(
            "A Qwen2ForCausalLM of five million parameters that writes in the manner of Shakespeare's plays. It is",
            "here so that every command can be tried at once, without a download, on a real trained checkpoint. It",
            "knows nothing and reasons about nothing.",
        )
        yield _fill(
            f"Hidden size {r.hidden}, intermediate size {r.intermediate}, {r.layers} layers, {r.heads} query heads of",
            f"{r.hidden // r.heads} and {r.kv_heads} key/value heads, tied embeddings, bf16; a byte-level BPE of",
            f"{self.vocabulary} tokens with Qwen2's pre-tokenizer; context {CONTEXT}. All files of this folder were",
            "written by `tools/train_demo.py`.",
        )

    def _text(self) -> Iterator[str]:
        plays, poems = PACKAGES
        yield "## What it was trained on"
        yield _fill(
            f"- {self.plays - len(HELD_OUT)} plays ({plays} on PyPI holds {self.plays}, Edward III among them), as",
            "printed and as conversations in ChatML: a character is the assistant, and what is said to him just before",
            'is the user\'s turn. Half of them begin with a system text such as "You are Hamlet.".',
        )
        yield _fill(
            '- The sonnets, which also answer requests such as "Write me a sonnet.", and the longer poems except Venus',
            f"and Adonis ({poems} on PyPI).",
        )
        yield _fill(
            f"One pass over it is about {self.pass_tokens / 1e6:.1f} million tokens. All of these texts are in the",
            "public domain, and of the two packages only the texts were used. Held out whole:",
            f"{' and '.join(VALIDATION_PLAYS)} (to choose settings by, and which weights to keep), and",
            f"{' and '.join(TEST_PLAYS)} (for the figures below).",
        )
        yield "The weights and the tokenizer are under the Apache License 2.0, as xinfer is."

    def _how(self) -> Iterator[str]:
        s, r = self.student, self.student.recipe
        minutes = (s.seconds + sum(t.seconds for t in self.teachers)) / 60
        yield "## How"
        yield "First, teachers were trained on the text:"
        for t in self.teachers:
            yield _fill(
                f"- hidden size {t.recipe.hidden}, {t.recipe.layers} layers, dropout {t.recipe.dropout}: {t.steps}",
                f"steps of {t.recipe.batch_tokens} tokens, perplexity on the validation play {math.exp(t.loss):.2f}",
            )
        yield _fill(
            f"Then this model was trained on the mean of their predictions ({1 - r.hard_share:.0%}) and the text",
            f"itself ({r.hard_share:.0%}): {s.steps} steps of {r.batch_tokens} tokens, learning rate",
            f"{r.learning_rate}, weight decay {r.weight_decay}, dropout {r.dropout}, Muon for the layers' matrices and",
            f"AdamW for the rest. The weights are those of step {s.kept_step}, with perplexity {math.exp(s.loss):.2f}",
            "on the validation play.",
        )
        yield _fill(
            f"{minutes:.1f} minutes of training on {self.device}. The weights were rounded to bf16; the figures below",
            "are those of the rounded ones.",
        )

    def _scores(self) -> Iterator[str]:
        f = self.held_out.figures()
        yield "## What it scores"
        yield _fill(
            f"On {' and '.join(TEST_PLAYS)}, whole ({self.held_out.tokens} tokens, in windows of {CONTEXT} that do not",
            "overlap), in float32:",
        )
        yield (
            "| perplexity a token | nats a token | bits a byte | perplexity a word |\n|---|---|---|---|\n"
            f"| {f['perplexity']:.2f} | {f['mean_nll']:.4f} | {f['bits_per_byte']:.3f} | {f['word_perplexity']:.1f} |"
        )
        yield _fill(
            "The text is `tests/data/heldout.txt`; the tests check these figures with transformers and with xinfer's",
            "own forward.",
        )

    def _samples(self) -> Iterator[str]:
        yield "## What it writes"
        yield _fill(
            "With the defaults of `generation_config.json`; what follows » is the model's. Not picked: first tries."
        )
        for prompt, answer in self.samples:
            yield f"```text\n{prompt}»{answer.rstrip()}\n```"


def _fill(*parts: str) -> str:
    indent = "  " if parts[0].startswith("- ") else ""
    return textwrap.fill(" ".join(parts), 118, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
