"""Penalties for tokens that a request has seen already."""

from __future__ import annotations

from torch import Tensor


def penalise(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    seen: Tensor,
    count_rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """For each token of a row's prompt or output: logit / repetition if that is positive, else logit * repetition
    (N. Keskar et al., "CTRL", 2019, as in Hugging Face's RepetitionPenaltyLogitsProcessor). From that, for tokens of
    the output alone: minus frequency * count, minus presence (OpenAI's API reference, "frequency and presence
    penalties").

    Only tokens that were seen are read and written: they are few, and so this is one look at `seen` instead of ten
    passes over the vocabulary.

    logits: [all rows, vocab] fp32, overwritten; rows: [n] int64, each once; counts: [pool, vocab] int32, how often a
    token stands in the output; seen: [pool, vocab] bool, tokens of prompt or output; count_rows: [n] int64, each row's
    place in the pool; repetition (above 0), presence, frequency: [n] fp32.
    """
    index, tokens = seen[count_rows].nonzero(as_tuple=True)
    places = (rows[index], tokens)
    values, times, factor = logits[places], counts[count_rows[index], tokens], repetition[index]
    values = values.div(factor).where(values > 0, values * factor)
    values -= frequency[index] * times + presence[index] * (times > 0)
    logits[places] = values
