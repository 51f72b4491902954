"""A Scorer as one of lm-eval's language models. Importing this imports lm-eval, which takes seconds.

A text that has nothing before it is scored after the model's ``prefix_id``. Where training put a token before each document,
every text begins with exactly one of it, also in ``loglikelihood_rolling``; what is cut from the left loses it, as with lm-eval's
own adapters. lm-eval's response cache is not keyed by the model (its issue 4063) and is not used.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from models.errors import UserError
from models.generation.settings import GenerationSettings
from models.harness.scoring import Answer, Ids, Scorer, score_continuations, shared_rows

CUT = "contexts cut from the left to fit the model"
SPLIT = "continuations longer than the model's context, scored window by window"
MERGED = "continuations that the tokenizer merges into their context, tokenised on their own"

MAX_TOKENS = 256  # of a generation whose task does not say: lm-eval's default
Progress = Callable[[int, int, str], None]  # done, in all, of what


def generation_settings(options: dict[str, Any]) -> GenerationSettings:
    """lm-eval's ``generation_kwargs`` as settings of ours. Raises UserError for one that has no counterpart."""
    known = normalize_gen_kwargs(options, MAX_TOKENS)
    stop, sample, temperature = known.pop("until"), known.pop("do_sample"), known.pop("temperature", 0.0)
    chosen = {"max_tokens": known.pop("max_gen_toks"), "temperature": temperature if sample else 0.0}
    chosen |= {name: known.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in known}
    if chosen.get("top_k", 1) < 1:  # elsewhere 0 and -1 mean all
        chosen["top_k"] = None
    if known:
        raise UserError(f"the task asks for generation options that are not supported: {', '.join(sorted(known))}")
    return GenerationSettings(stop=tuple(text for text in stop if text), **chosen)


class HarnessModel(TemplateLM):
    """lm-eval's view of a Scorer. ``notes`` counts what was not scored as it stands; empty it between tasks."""

    def __init__(self, scorer: Scorer, batch_tokens: int, progress: Progress = lambda done, total, unit: None) -> None:
        """``batch_tokens``: the most tokens of a batch, padding included (see ``score_continuations``)."""
        super().__init__()
        self.scorer, self.batch_tokens, self.progress = scorer, batch_tokens, progress
        self.notes: Counter[str] = Counter()

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.scorer.eos_id is None else self.scorer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.prefix_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of ``string``, after the token that texts begin with (``bos_id``) unless ``add_special_tokens`` is False."""
        ids, bos = self.scorer.encode(string), self.scorer.bos_id
        return ids if add_special_tokens is False or bos is None or ids[:1] == [bos] else [bos, *ids]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval's (spaces at the end of the context move over), but neither side ever loses its tokens."""
        if not context.strip():
            return [self.prefix_token_id], self.tok_encode(context + continuation, add_special_tokens=False)
        before, after = super()._encode_pair(context, continuation)
        if continuation and not after:
            self.notes[MERGED] += 1
            after = self.tok_encode(continuation, add_special_tokens=False)
        return before, after

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """(log-likelihood in nats, is greedy) of each (context, continuation). Nothing after nothing has log-likelihood 0."""
        something = [bool(context or self.scorer.encode(continuation)) for context, continuation in (r.args for r in requests)]
        asked = [request for request, scored in zip(requests, something, strict=True) if scored]
        answers = iter(super().loglikelihood(asked, disable_tqdm=True))
        return [next(answers) if scored else (0.0, True) for scored in something]

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[Answer]:
        return self._sums([self._windows(before, after) for _, before, after in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood in nats of each text: every token once, in windows as long as the model's context."""
        texts = (self.tok_encode(request.args[0], add_special_tokens=False) for request in requests)
        # A text that spells the beginning-of-text token itself does not get another.
        texts = (ids[1:] if ids[:1] == [self.scorer.bos_id] else ids for ids in texts)
        return [nats for nats, _ in self._sums([self._rolling(self.prefix_token_id, ids) for ids in texts])]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[str]:
        """A continuation of each (prompt, options) up to a stop text, the document's end or the most tokens.

        Prompts that leave no room for these are cut from the left, to half of the context at most.
        """
        asked: dict[GenerationSettings, list[tuple[int, str]]] = {}
        for index, (prompt, options) in enumerate(request.args for request in requests):
            settings = generation_settings(options)
            room = self.scorer.context - min(settings.max_tokens, self.scorer.context // 2) - 1
            asked.setdefault(settings, []).append((index, self._fit(prompt, room)))
        texts: dict[int, str] = {}
        for settings, prompts in asked.items():
            prompts.sort(key=lambda item: -len(item[1]))  # neighbours in a batch are of a length
            for start in range(0, len(prompts), settings.batch_size):
                part = prompts[start : start + settings.batch_size]
                made = self.scorer.generate([prompt for _, prompt in part], settings)
                texts |= {index: text for (index, _), text in zip(part, made, strict=True)}
                self.progress(len(texts), len(requests), "prompts")
        return [texts[index] for index in range(len(requests))]

    def _fit(self, prompt: str, room: int) -> str:
        """The end of ``prompt`` that has at most ``room`` tokens."""
        ids, keep = self.scorer.encode(prompt), room
        self.notes[CUT] += len(ids) > room
        while len(ids) > room:  # the end of a text may be tokenised in another way than the text
            prompt = self.scorer.decode(ids[-keep:])
            ids, keep = self.scorer.encode(prompt), keep - 1
        return prompt

    def _windows(self, before: Ids, after: Ids) -> list[tuple[Ids, Ids]]:
        context = self.scorer.context
        if len(after) > context:
            self.notes[SPLIT] += 1
            return self._rolling(before[-1], after)
        self.notes[CUT] += len(before) + len(after) > context + 1
        return [(before, after)]

    def _rolling(self, prefix: int, ids: Ids) -> list[tuple[Ids, Ids]]:
        windows = get_rolling_token_windows(list(ids), prefix, self.scorer.context, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def _sums(self, windows: Sequence[list[tuple[Ids, Ids]]]) -> list[Answer]:
        """The answer to each request from those to its windows."""
        pairs = [pair for request in windows for pair in request]
        most = self.batch_tokens if self.scorer.branches else 0
        total = sum(map(len, shared_rows(pairs, self.scorer.context, most)))
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.progress(done, total, "tokens")

        answers = iter(score_continuations(self.scorer, pairs, self.batch_tokens, advance))
        parts = [[next(answers) for _ in request] for request in windows]
        return [(sum((nats for nats, _ in part), 0.0), all(greedy for _, greedy in part)) for part in parts]
