"""Token ids as a model takes them, on whatever it runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xinfer.errors import RequestError


def checked_ids(tokens: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    """`tokens` as ids (T,), at least one.

    Raises:
        RequestError: they are not a flat list of integers, or one of them is outside the vocabulary.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0:
        raise RequestError(f"tokens of shape {ids.shape} were given: expected a flat list of at least one id")
    if not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(f"tokens of type {ids.dtype} were given: expected integers")
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise RequestError(
            f"token {int(ids[at])} at place {at} is not in the vocabulary: expected 0 to {vocab_size - 1}; "
            "was the text encoded with another model's tokenizer?"
        )
    return ids.astype(np.int64)
