"""A server on loopback that speaks the OpenAI API with the numbers of plain transformers: greedy text, and
log-probabilities of echoed prompts and of the likeliest tokens."""

import threading
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from faulty_server import FaultyServer, running

MODEL = "scoring-1"


class ScoringServer(FaultyServer):
    """One prompt at a time, unpadded. ``echoes`` and ``lists`` tell whether it gives log-probabilities of prompts, and
    alternatives of generated tokens; what it does not give, it ignores, as `transformers serve` does."""

    def __init__(self, model: Any, tokenizer: Any, *, echoes: bool = True, lists: bool = True) -> None:
        super().__init__((), MODEL)
        self._model = model
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._lists = lists
        self._one_at_a_time = threading.Lock()
        self._token = cache(lambda token: tokenizer.decode([token]))  # asked for every position of every prompt

    def content(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole reply; a prompt of messages is their texts, one after the other."""
        is_chat = "messages" in body
        prompt = "".join(message["content"] for message in body["messages"]) if is_chat else body["prompt"]
        with self._one_at_a_time, torch.no_grad():
            ids = self._tokenizer(prompt, return_tensors="pt").input_ids
            whole = greedy(self._model, ids, body["max_tokens"])
            logprobs = self._model(whole).logits[0].float().log_softmax(-1)
        num_prompt, new = ids.shape[1], whole[0, ids.shape[1] :]
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        finish = "length" if len(new) == body["max_tokens"] else "stop"
        for stop in body.get("stop", ()):
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text}
            if body.get("logprobs") and self._lists:
                choice["logprobs"] = self._of_chat(whole[0], num_prompt, logprobs, body["top_logprobs"])
        else:
            is_echo = bool(body.get("echo")) and self._echoes
            choice["text"] = prompt + text if is_echo else text
            if "logprobs" in body and (is_echo or (self._lists and not body.get("echo"))):
                begin = 0 if is_echo else num_prompt
                choice["logprobs"] = self._of_text(
                    whole[0], begin, logprobs, body["logprobs"], 0 if is_echo else len(prompt)
                )
        usage = {"prompt_tokens": num_prompt, "completion_tokens": len(new), "total_tokens": num_prompt + len(new)}
        return {"id": "reply", "created": 1, "model": self.model, "choices": [choice], "usage": usage}

    def _of_text(
        self, ids: torch.Tensor, begin: int, logprobs: torch.Tensor, most: int, offset: int
    ) -> dict[str, list[Any]]:
        """As vLLM has it: offsets count the text of special tokens, too."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for at in range(begin, len(ids)):
            token = self._token(int(ids[at]))
            found["tokens"].append(token)
            found["text_offset"].append(offset)
            found["token_logprobs"].append(logprobs[at - 1, ids[at]].item() if at else None)
            found["top_logprobs"].append(dict(self._top(logprobs[at - 1], most)) if at else None)
            offset += len(token)
        return found

    def _of_chat(self, ids: torch.Tensor, begin: int, logprobs: torch.Tensor, most: int) -> dict[str, list[Any]]:
        def entry(token: str, logprob: float) -> dict[str, Any]:
            return {"token": token, "logprob": logprob}

        return {
            "content": [
                {
                    **entry(self._token(int(ids[at])), logprobs[at - 1, ids[at]].item()),
                    "top_logprobs": [entry(*each) for each in self._top(logprobs[at - 1], most)],
                }
                for at in range(begin, len(ids))
            ]
        }

    def _top(self, logprobs: torch.Tensor, most: int) -> list[tuple[str, float]]:
        values, ids = logprobs.topk(most)
        return [(self._token(token), value) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]


def greedy(model: Any, ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
    """Ids [1, n] and what plain transformers adds to them; nothing is padding, whatever its id."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)


def scoring_server(model: Any, tokenizer: Any, **gives: bool) -> AbstractContextManager[ScoringServer]:
    """A server of these weights, while it is open."""
    return running(ScoringServer(model, tokenizer, **gives))
