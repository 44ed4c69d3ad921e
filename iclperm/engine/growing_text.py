"""A text that a session generates, token by token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iclperm.engine.growing_tree import GrowingTree
from iclperm.engine.sampling import Sampling
from iclperm.engine.texts import INVALID, Ending
from iclperm.engine.tree import IntArray


class GrowingText:
    """What goes on after a node: its ``path`` in the tree, with all that was generated."""

    def __init__(self, path: IntArray, sampling: Sampling, draw: int, tree: GrowingTree) -> None:
        self.path, self.start, self.draw = path, int(path[-1]) if path.size else 0, draw
        self.ids: list[int] = []
        self.finish: str | None = None
        self.logprob, self.num_tokens, self.num_fed = 0.0, 0, 0
        self._prompt = tree.ids_of(path)
        self._sampling = sampling
        self._chances: npt.NDArray[np.float64] | None = None

    def chance(self, most: int) -> float:
        """What its next token is drawn with; it has ``most`` at most."""
        if self._chances is None:
            self._chances = self._sampling.uniforms(self._prompt, self.draw, most)
        return float(self._chances[self.num_tokens])

    def take(self, token: int, logprob: float, ending: Ending, tree: GrowingTree) -> None:
        """Give it its next token, -1 where logits were not finite."""
        self.num_fed = len(self.ids)
        if token < 0:
            self.finish = INVALID
            return
        self.num_tokens += 1
        self.logprob += logprob
        self.finish = ending.after(self.ids, token)
        if self.finish is None:
            self.path = tree.insert(self.path, np.array([token], np.int32))
