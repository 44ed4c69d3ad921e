"""How a run's work is cut, and how much of its answers is read at once."""

from __future__ import annotations

from dataclasses import dataclass

from iclperm.base.arrays import MOST_HELD


@dataclass(frozen=True)
class WorkLimits:
    """Sizes that a run keeps to. The first six decide which unit and which file an answer is in: every session of a run
    folder must have the same. The others change no result, only memory and how often files are read."""

    unit_flops: int = 2_000_000_000_000
    """Floating-point operations of a unit: what a kill costs at most. Ten seconds at the float32 rate of two cores."""
    unit_tokens: tuple[int, int] = (1 << 12, 1 << 16)
    """The fewest and the most tokens of a unit, however large the model is."""
    unit_prompts: int = 256
    """Prompts of a unit of an API, about; its replies are kept one by one anyway."""
    general_cells: int = 4_096
    """Cells outside the products in one file: more where there would be more than ``parts`` files."""
    generated_cells: int = 64
    """Likewise where answers are generated, which takes longer."""
    parts: int = 4_000
    """Files of units, and files of other cells, that one growth of a run has at most."""
    table_rows: int = 1 << 18
    """Rows of the canonical table that are made at once, some 50 MB; one context's rows at least."""
    bytes_at_once: int = 1 << 28
    """Of log-likelihoods that are read back at once; what needs more reads every file once for every so many bytes, at
    most 16 times."""
    cells_unfinished: int = 1 << 28
    """Of a run that is not finished: of a larger one the parts are checked one by one, not against the plan."""
    cells_at_opening: int = 1 << 24
    """Answers of a run that are read when it is opened; those of a larger one are read when they are first used."""
    bytes_in_memory: int = MOST_HELD
    """Of one large array; see `iclperm.base.arrays`."""
    is_told: bool = False
    """Whether the run's folder says how many tokens its units have, so that every session keeps to it by itself."""

    def tokens_of_unit(self, decoder_parameters: int) -> int:
        """Tokens that a model of this size takes ``unit_flops`` for, within ``unit_tokens``."""
        least, most = self.unit_tokens
        return min(max(self.unit_flops // (2 * decoder_parameters), least), most)


DEFAULT = WorkLimits()
"""The sizes of a run that a processor begins, unless others are given."""
OF_A_GPU = WorkLimits(unit_flops=200_000_000_000_000, unit_tokens=(1 << 14, 1 << 17), is_told=True)
"""Of one that a GPU begins, whose packs are as large as it wants them: of a model of up to 6 B parameters a second of a
fast one, twenty of a T4."""
