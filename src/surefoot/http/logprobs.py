"""How log-probabilities are spelled: OpenAI's shapes for chats and for texts, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.frontend.output import NO_SCORE, Score, ScoredToken
from surefoot.http.service import Tokenizer

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # as OpenAI has it: JSON knows no infinity


class TokenSpelling:
    """`as_ids`: tokens are written as "token_id:42", which tells apart those of the same text."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def of_chat(self, tokens: Sequence[ScoredToken]) -> Json:
        """{"content": [{"token", "logprob", "bytes", "top_logprobs": [the same]}]}"""
        content = []
        for token in tokens:
            top = [self._chat_entry(*entry) for entry in token.score.top]
            content.append(self._chat_entry(token.id, token.score.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def of_text(self, tokens: Sequence[ScoredToken], most: int) -> Json:
        """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}: lists of equal length.

        An entry of top_logprobs maps the `most` most probable tokens, and the one that stands there, to theirs.
        """
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            told["tokens"].append(self.text(token.id))
            told["text_offset"].append(token.offset)
            if token.score is NO_SCORE:
                told["token_logprobs"].append(None)
                told["top_logprobs"].append(None)
                continue
            told["token_logprobs"].append(_finite(token.score.logprob))
            top: dict[str, float] = {}
            for token_id, logprob in (*token.score.top[:most], (token.id, token.score.logprob)):
                top.setdefault(self.text(token_id), _finite(logprob))  # the best of those of the same text
            told["top_logprobs"].append(top)
        return told

    def of_prompt(self, prompt_ids: Sequence[int], scores: Sequence[Score], most: int) -> list[Json | None]:
        """For each token but the first, whose entry is null: {id: {"logprob", "rank", "decoded_token"}}.

        `rank` is 1 for the most probable token, and null for a token that is not among the `most` most probable ones.
        """
        told: list[Json | None] = [None]
        for token_id, score in zip(prompt_ids[1:], scores, strict=True):
            ranked = {id_: (logprob, rank) for rank, (id_, logprob) in enumerate(score.top[:most], start=1)}
            ranked_all = {token_id: ranked.get(token_id, (score.logprob, None))} | ranked
            told.append(
                {
                    str(id_): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(id_)}
                    for id_, (logprob, rank) in ranked_all.items()
                }
            )
        return told

    def _chat_entry(self, token_id: int, logprob: float) -> Json:
        spelled = list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": spelled}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
