"""Texts with a given number of tokens, made of common words that the server's own tokenizer has counted."""

from dataclasses import dataclass

import numpy as np

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art history party result change morning reason "
    "research girl guy moment air teacher force education good new first last long great little own other old big "
    "high different small large next early young important few public bad same able be have do say get make go know "
    "take see come think look want give use find tell ask seem feel try leave call need become put mean keep let begin "
    "help talk turn start show hear play run move like live believe hold bring happen write provide sit stand lose pay "
    "meet include continue set learn lead understand watch follow stop create speak read allow add spend grow open "
    "walk win offer remember love consider appear buy wait serve send expect build stay fall cut reach remain"
)
LEAD = "the"
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class WordList:
    """Words, and how many tokens each adds to a text; uncounted words are assumed to add one. A counted text starts
    with `LEAD`, because a word without a space before it may be tokenized differently."""

    words: tuple[str, ...] = WORDS
    costs: tuple[int, ...] = ()
    lead_cost: int = 0

    @property
    def is_counted(self) -> bool:
        return bool(self.costs)

    def text(self, num_tokens: int, rng: np.random.Generator) -> str:
        """Joins words to `num_tokens` tokens, or as few above that as possible."""
        costs = np.array(self.costs or [1] * len(self.words))
        order = np.argsort(costs, kind="stable")
        costs = costs[order]
        chosen = [LEAD] if self.is_counted else []
        num_tokens -= self.lead_cost
        while num_tokens > 0:
            num_fitting = int(np.searchsorted(costs, num_tokens, side="right")) or int(np.sum(costs == costs[0]))
            index = int(rng.integers(num_fitting))
            chosen.append(self.words[order[index]])
            num_tokens -= max(int(costs[index]), 1)
        return " ".join(chosen)
