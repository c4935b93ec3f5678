"""Training of the demo model: a few larger teachers, then the small model that ships, taught by all of them.

The plays are little text (1.4 million tokens) for a model of five million parameters: trained directly it soon learns
them by heart instead of the language. What helped on held-out plays: dropout, Muon for the matrices, and above all
distillation from the mean prediction of larger models, each trained with strong dropout and kept where its held-out
loss was lowest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2Config, Qwen2ForCausalLM

CONTEXT = 2048  # max_position_embeddings
SHORT_WINDOW = 512  # every fourth pass over the text uses windows of CONTEXT tokens, the others of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training run."""

    hidden: int = 256
    intermediate: int = 704
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    steps: int = 1000
    batch_tokens: int = 32768
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    muon: bool = True
    hard_share: float = 0.2  # of a taught model's loss: the text itself, beside the teachers' predictions
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One pass over the text in one row: token ids, and which of them count in the loss."""

    tokens: NDArray[np.int64]  # (n,)
    counts: NDArray[np.bool_]  # (n,)


@dataclass(frozen=True, slots=True)
class Run:
    """How a model came about."""

    recipe: Recipe
    loss: float  # mean nats a token on the validation play, the lowest seen: those are the weights kept
    steps: int
    kept_step: int
    seconds: float


def make_model(recipe: Recipe, *, vocab_size: int, eos_token_id: int | None) -> Any:
    """A Qwen2ForCausalLM of the recipe's shape with fresh weights."""
    torch.manual_seed(recipe.seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # the residual branches start small, as deep as the network is
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * recipe.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * recipe.layers) ** -0.5)
    return model


def add_dropout(model: Any, probability: float) -> None:
    """Dropout on what enters the residual stream (Qwen2 itself has none): the embedding, each layer's two branches."""
    keep = torch.tensor(1.0 - probability, device=model.device)  # a tensor: another value is no new compilation

    def drop(module: Any, _args: Any, output: Any) -> Any:
        if not module.training:
            return output
        return output * (torch.rand_like(output, dtype=torch.float32) < keep) / keep.to(output.dtype)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


# ------------------------------------------------------------------------------------------------------------ optimizer


class Optimizer:
    """Muon for the matrices of the layers, AdamW for everything else; weight decay on matrices only.

    Muon (Jordan and others, 2024): the momentum of a matrix, made orthogonal by five Newton-Schulz steps, is the
    update; here it is scaled to the root mean square of an AdamW update, so that one learning rate serves both.
    Matrices of one shape go together.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.recipe = recipe
        named = list(model.named_parameters())
        is_muon = {name: recipe.muon and p.ndim == 2 and "layers." in name for name, p in named}
        shapes: dict[Any, list[Any]] = {}
        for name, p in named:
            if is_muon[name]:
                shapes.setdefault(p.shape, []).append(p)
        self.stacks = [(ps, torch.zeros(len(ps), *shape, device=model.device)) for shape, ps in shapes.items()]
        decayed = [p for name, p in named if not is_muon[name] and p.ndim == 2]
        plain = [p for name, p in named if not is_muon[name] and p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=model.device.type == "cuda",
        )

    def step(self, learning_rate: float) -> None:
        """One update with the gradients at hand, which are cleared."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with torch.no_grad():
            for params, momentum in self.stacks:
                gradient = torch.stack([p.grad for p in params])
                momentum.lerp_(gradient, 0.05)
                update = _orthogonal(gradient.lerp(momentum, 0.95))
                scale = 0.2 * math.sqrt(max(gradient.shape[-2:]))
                torch._foreach_mul_(params, 1 - learning_rate * self.recipe.weight_decay)
                torch._foreach_add_(params, list((update * (-learning_rate * scale)).unbind()))
        self.adamw.zero_grad()
        for params, _ in self.stacks:
            for p in params:
                p.grad = None


def _orthogonal(stack: Any) -> Any:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix of each matrix in `stack` (n, rows, columns)."""
    x = stack.to(torch.bfloat16 if stack.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


# ----------------------------------------------------------------------------------------------------------------- loss


def _text_loss(logits: Any, targets: Any, counts: Any) -> Any:
    """Mean cross entropy, in nats, over the positions that count. logits (b, t, vocab), targets and counts (b, t)."""
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()


def _taught_loss(logits: Any, targets: Any, counts: Any, hard_share: Any, *teachers: Any) -> Any:
    """`_text_loss`, and the cross entropy against the mean of the teachers' distributions, mixed by `hard_share`."""
    taught = sum(torch.softmax(t.float(), dim=-1) for t in teachers) / len(teachers)
    log_p = torch.log_softmax(logits.float(), dim=-1)  # (b, t, vocab)
    hard = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    losses = hard_share * hard - (1 - hard_share) * (taught * log_p).sum(-1)
    return (losses * counts).sum() / counts.sum()


class Compiler:
    """Compiles layer by layer, as one layer's code serves all of them, or does nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        if enabled:
            torch._dynamo.config.cache_size_limit = 64  # one entry for every width and window length
            torch.set_float32_matmul_precision("high")

    def layers(self, model: Any) -> None:
        """Compiles the decoder layers of `model`, when they first run."""
        if self.enabled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled when it first runs."""
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False) if self.enabled else function
        return compiled

    def eager(self) -> AbstractContextManager[Any]:
        """For calls of a shape that occurs too seldom to be worth compiling."""
        if not self.enabled:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return context


def _autocast(device: Any) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast("cuda", torch.bfloat16)
    return context


def _logits(model: Any, tokens: Any) -> Any:
    """(b, t) token ids -> (b, t, vocab)."""
    return model.lm_head(model.model(input_ids=tokens, use_cache=False).last_hidden_state)


# ------------------------------------------------------------------------------------------------------------- training


def batches(streams: Callable[[int], Stream], recipe: Recipe, device: Any) -> Iterator[tuple[int, Any, Any]]:
    """(pass, tokens (b, t + 1), counts (b, t + 1)), for ever: windows that tile the text from a random offset."""
    rng = np.random.default_rng(recipe.seed)
    for number in range(1 << 30):
        stream = streams(number)
        window = min(CONTEXT if number % 4 == 3 else SHORT_WINDOW, recipe.batch_tokens)
        rows = recipe.batch_tokens // window
        offset = int(rng.integers(window))
        n = (len(stream.tokens) - offset - 1) // window // rows * rows
        starts = torch.from_numpy(offset + window * rng.permutation(n)).to(device)
        tokens = torch.from_numpy(stream.tokens).to(device)
        counts = torch.from_numpy(stream.counts).to(device)
        span = torch.arange(window + 1, device=device)
        for at in starts.split(rows):
            index = at[:, None] + span
            yield number, tokens[index], counts[index]


def train(
    model: Any,
    recipe: Recipe,
    streams: Callable[[int], Stream],
    validation: NDArray[np.int64],
    *,
    compiler: Compiler,
    teachers: Sequence[Any] = (),
    seconds: float = math.inf,
    evaluations: int = 6,
) -> Run:
    """Trains `model` in place and leaves it with the weights that did best on `validation`.

    The number of steps is cut to what fits into about so many `seconds`.
    """
    device = model.device
    add_dropout(model, recipe.dropout)
    compiler.layers(model)
    optimizer = Optimizer(model, recipe)
    loss_function = compiler.function(_taught_loss if teachers else _text_loss)
    hard_share = torch.tensor(recipe.hard_share, device=device)
    pace = _Pace(recipe.steps, seconds, device)
    best: dict[str, Any] = {}
    best_loss, best_step = math.inf, 0
    for step, (number, tokens, counts) in enumerate(batches(streams, recipe, device)):
        model.train()
        with _autocast(device):
            with torch.no_grad():
                taught = [_logits(teacher, tokens[:, :-1]) for teacher in teachers]
            extra = (hard_share, *taught) if teachers else ()
            loss = loss_function(_logits(model, tokens[:, :-1]), tokens[:, 1:], counts[:, 1:], *extra)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(recipe.learning_rate * _schedule(step, pace.steps))
        pace.after(step)
        done = step + 1 >= pace.steps
        if done or (step + 1) % math.ceil(pace.steps / evaluations) == 0:
            held_out = evaluate(model, validation, compiler=compiler)
            print(
                f"  step {step + 1}/{pace.steps} pass {number + 1}: loss {loss.item():.4f}, "
                f"held-out {held_out:.4f}, perplexity {math.exp(held_out):.2f} ({pace.spent():.0f} s)",
                flush=True,
            )
            if held_out < best_loss:
                best_loss, best_step = held_out, step + 1
                best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        if done:
            break
    model.load_state_dict(best)
    return Run(recipe, best_loss, pace.steps, best_step, pace.spent())


class _Pace:
    """Cuts the number of steps to what fits into `seconds` from step 20 on; the steps before hold the compilation."""

    def __init__(self, steps: int, seconds: float, device: Any) -> None:
        self.steps = steps
        self.seconds = seconds
        self.device = device
        self.started = time.perf_counter()
        self.settled = 0.0

    def spent(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self.started

    def after(self, step: int) -> None:
        if step == 20 and math.isfinite(self.seconds):
            self.settled = self.spent()
        elif step == 60 and math.isfinite(self.seconds):
            a_step = (self.spent() - self.settled) / 40
            self.steps = min(self.steps, max(80, int(self.seconds / a_step)))


def _schedule(step: int, total: int) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine to zero."""
    warm = max(1, total // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm)))


# ----------------------------------------------------------------------------------------------------------- evaluation


def evaluate(model: Any, tokens: NDArray[np.int64], *, compiler: Compiler) -> float:
    """Mean loss in nats a token."""
    return mean_loss(window_losses([model], tokens, compiler=compiler))


def mean_loss(windows: Sequence[tuple[float, int]]) -> float:
    """Mean of what `window_losses` gives."""
    return sum(loss for loss, _ in windows) / sum(n for _, n in windows)


def window_losses(
    models: Sequence[Any], tokens: NDArray[np.int64], *, compiler: Compiler, exact: bool = False
) -> list[tuple[float, int]]:
    """(summed loss in nats, predictions) of each window of CONTEXT tokens; windows do not overlap.

    The first token of a window is not predicted. Of several models the mean distribution counts. `exact` computes in
    the weights' own type where a GPU would otherwise round to bf16.
    """
    device = models[0].device
    result = []
    for model in models:
        model.eval()
    with torch.no_grad(), compiler.eager(), nullcontext() if exact else _autocast(device):
        for start in range(0, len(tokens) - 1, CONTEXT):
            window = torch.from_numpy(tokens[start : start + CONTEXT]).to(device)[None]  # (1, t)
            log_p = [torch.log_softmax(_logits(model, window)[:, :-1].float(), dim=-1) for model in models]
            mean = torch.logsumexp(torch.stack(log_p), dim=0) - math.log(len(models))  # (1, t - 1, vocab)
            loss = torch.nn.functional.nll_loss(mean[0], window[0, 1:], reduction="sum")
            result.append((loss.item(), window.shape[1] - 1))
    return result


def best_ensemble(models: Sequence[Any], tokens: NDArray[np.int64], *, compiler: Compiler) -> tuple[list[int], float]:
    """Greedy choice of the models whose mean prediction is best on `tokens`: (their indices, loss in nats)."""
    chosen: list[int] = []
    best = math.inf
    while len(chosen) < len(models):
        trials = []
        for i in range(len(models)):
            if i not in chosen:
                losses = window_losses([models[j] for j in [*chosen, i]], tokens, compiler=compiler)
                trials.append((mean_loss(losses), i))
        loss, i = min(trials)
        if loss >= best:
            break
        best = loss
        chosen.append(i)
    return chosen, best
