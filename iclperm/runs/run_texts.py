"""A run's prompts as texts: kept in its folder when it is run, or made from its data again and held against it.

``texts.parquet`` (`iclperm.runs.texts`) lies beside the results, and its checksum is written last: without that it is
not there yet. It is no part of what identifies a run, and no result rests on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm.base.files import writable
from iclperm.errors import DamagedItem, DataError, ModelError, RunError, is_out_of_memory
from iclperm.prompts.chat import Message, TextTokenizer
from iclperm.prompts.contexts import context_id, context_ids
from iclperm.prompts.design import CONTENT_FREE, Design, draw
from iclperm.prompts.encode import EncodedText, JointEncoder
from iclperm.prompts.render import DesignTexts
from iclperm.prompts.retrieved import rank_order_id
from iclperm.prompts.tokenise import Pieces, Prompts
from iclperm.runs.folder import RunFolder
from iclperm.runs.layout import tokenised
from iclperm.runs.run import FinishedRun
from iclperm.runs.setting import (
    ResolvedStudy,
    model_tokenizer,
    resolved,
    scoring_of,
    study_examples,
    study_model_folder,
)
from iclperm.runs.stored import MOST_OF_TABLE, checksum_line, table_bytes, table_of
from iclperm.runs.texts import MOST_OWN, PromptTexts, texts_table
from iclperm.runs.work import Work
from iclperm.study.study import Study
from iclperm.tasks.examples import compared_text
from iclperm.tasks.task import Examples, Task

NAME = "texts.parquet"
_CHECKSUM = f"{NAME}.sha256"
_CHECKSUM_BYTES = 1 << 10
_MOST_OTHER_ROWS = MOST_OWN + (1 << 14)
"""Rows of the table beside those of demonstrations and queries: labels, and what has tokens of its own."""
Query = tuple[str, int]
"""A split and the number of a query in it."""


@dataclass(frozen=True)
class OrderingRows:
    """Orderings that are seen at some numbers of ``shots``: ``rows`` int64 [S, P, K] of train in the order of the
    prompt (ranks, where each query has its own), and ``contexts`` int64 [S, P, shots], what the run calls the
    contexts."""

    shots: tuple[int, ...]
    rows: NDArray[np.int64]
    contexts: NDArray[np.int64]


@dataclass(frozen=True)
class RunPrompts:
    """Every prompt of a run as it was scored."""

    texts: PromptTexts
    groups: tuple[OrderingRows, ...]
    is_of_api: bool
    """Whether an API was asked, whose tokens are not known; it renders chats, of which the texts are but a likeness."""
    own: NDArray[np.int64] | None = None
    """Rows of train of each test query's own demonstrations, best first, int64 [S, Q, K]; None where all share them."""

    def rows(self, index_set: int, permutation: int, shots: int, query: Query | None = None) -> list[int]:
        """The rows of train that a prompt shows, in order; where each query has its own, those of ``query``."""
        group, _ = self._place(shots)
        rows = group.rows[index_set, permutation, :shots]
        if self.own is not None:
            assert query is not None
            rows = self.own[index_set, query[1]][rows]
        found: list[int] = rows.tolist()
        return found

    def context(self, index_set: int, permutation: int, shots: int) -> int:
        """What the run calls the context."""
        group, place = self._place(shots)
        return int(group.contexts[index_set, permutation, place])

    def text(self, index_set: int, permutation: int, shots: int, query: Query | None = None) -> str:
        """The prompt, up to the label; without a query up to where that would begin."""
        return self.texts.text(self.rows(index_set, permutation, shots, query), query)

    def messages(self, index_set: int, permutation: int, shots: int, query: Query) -> list[Message]:
        """The messages of a chat; none of other prompts."""
        return self.texts.messages(self.rows(index_set, permutation, shots, query), query)

    def tokens(self, index_set: int, permutation: int, shots: int, query: Query | None = None) -> EncodedText | None:
        """The tokens of the same, with the places in the text where they end; None where they are not known."""
        cell = index_set, permutation, shots
        return self.texts.tokens(self.rows(*cell, query), self.context(*cell), query)

    def context_tokens(
        self, index_set: int, permutation: int, shots: int, query: Query | None = None
    ) -> EncodedText | None:
        """The tokens before the query; None where they are not known."""
        cell = index_set, permutation, shots
        if self.own is not None and query is not None and (self.context(*cell), *query) in self.texts.cells:
            return None  # only the whole prompt is kept
        return self.texts.tokens(self.rows(*cell, query), self.context(*cell))

    def are_those_of(self, cells: Iterable[tuple[int, int]]) -> bool:
        """Whether the contexts of some (set, permutation) have the tokens that the run names them by, where tokens are
        known; for an API the very text. Orders of ranks are named by these. O(tokens)."""
        if self.own is None and not (self.texts.has_tokens or self.is_of_api):
            return True
        return all(
            self._names(*cell, group) == group.contexts[cell].tolist() for cell in cells for group in self.groups
        )

    def _names(self, index_set: int, permutation: int, group: OrderingRows) -> list[int]:
        """What the contexts of an ordering would be called by their tokens."""
        cell, contexts = (index_set, permutation), group.contexts[index_set, permutation].tolist()
        if self.own is not None:
            return [rank_order_id(index_set, group.rows[cell])]
        if self.texts.has_tokens and self.texts.contexts.keys().isdisjoint(contexts):  # each begins as the next
            rows = self.rows(*cell, max(group.shots))
            whole = self.tokens(*cell, max(group.shots))
            assert whole is not None
            return context_ids(whole.ids, self.texts.context_lengths(rows)[list(group.shots)])
        each = (self.tokens(*cell, shots) or text_tokens(self.text(*cell, shots)) for shots in group.shots)
        return [context_id(tokens.ids) for tokens in each]

    def _place(self, shots: int) -> tuple[OrderingRows, int]:
        return next((group, group.shots.index(shots)) for group in self.groups if shots in group.shots)


def text_tokens(text: str) -> EncodedText:
    """The bytes of a text, which stand for the tokens of an API."""
    (tokens,) = JointEncoder(TextTokenizer(), "")([text])
    return tokens


def run_prompts(run: FinishedRun) -> tuple[RunPrompts, list[str]]:
    """The prompts of a run, from its folder where they are kept, else from its data read again; and what should be
    known of them.

    Raises `DataError` or `RunError` where data, wording or tokens are not those of the run, and what reading raises.
    """
    try:
        kept = kept_prompts(run)
    except DamagedItem as error:
        found, notes = prompts_again(run)
        return found, [str(error), *notes]
    return (kept, []) if kept is not None else prompts_again(run)


def kept_prompts(run: FinishedRun) -> RunPrompts | None:
    """The prompts in a run's folder; None where none are kept, `DamagedItem` where they are not what was written."""
    return None if run.folder is None else _kept_in(recorded_folder(run), run.study)


def prompts_again(run: FinishedRun) -> tuple[RunPrompts, list[str]]:
    """The prompts of a run from its data, and what should be known of them; raises as `run_prompts`."""
    task = Task.load(run.study.task, run.study.data)
    study = resolved(run.study, task)
    examples = study_examples(study, task)
    if run.folder is not None:
        refuse_other_data(run, task, examples)
    design = draw(study, task, examples)
    tokenizer, notes = tokenizer_at_hand(study)
    if tokenizer is None:
        texts = DesignTexts(design, task, examples, scoring_of(study), None)
        prompts, pieces = None, Pieces(texts, None, None, {}, np.empty(0, dtype=np.int32))
    else:
        prompts = tokenised(ResolvedStudy(study, task, examples, design, None), tokenizer)
        pieces = prompts.pieces
    is_of_api = study.endpoint is not None
    start = [] if tokenizer is None else tokenizer.convert_ids_to_tokens(pieces.before.tolist())
    table = texts_table(task, design, examples["train"], pieces, None if is_of_api else prompts, start)
    texts_read = PromptTexts.of_table(table)
    if run.folder is None:
        own = None if design.neighbours is None else design.own
        return RunPrompts(texts_read, _drawn(design, prompts), is_of_api, own), list(notes)
    folder = recorded_folder(run)
    if not _are_queries_of(texts_read, folder):
        raise other_data(run)
    return RunPrompts(texts_read, _recorded(folder), is_of_api, recorded_own(folder)), list(notes)


def keep_texts(folder: RunFolder, study: Study, lay_out: Callable[[], Work]) -> None:
    """Writes the texts of a run into its folder, unless they are there as they should be; damaged ones are set aside.

    ``lay_out`` gives the work of the ``study`` where it is needed. Raises `RunStopped` where the folder cannot be
    written.
    """
    try:
        is_damaged = False
        if _kept_in(folder, study) is not None:
            return
    except DamagedItem:
        is_damaged = True
    work = lay_out()
    setting, pieces = work.setting, work.prompts.pieces
    prompts = None if setting.study.endpoint else work.prompts
    start = work.opening[: len(pieces.before)]
    table = texts_table(setting.task, setting.design, setting.examples["train"], pieces, prompts, start)
    raw = table_bytes(table)
    path, checksum = folder.path / NAME, folder.path / _CHECKSUM
    with writable(folder.path):
        if folder.files.has(path) and is_damaged:
            folder.set_aside(path)
        folder.files.remove(checksum)
        folder.files.write_whole(path, raw, staging=folder.path / "tmp")
        folder.files.write_whole(checksum, checksum_line(NAME, raw), staging=folder.path / "tmp")


def drop_texts(folder: RunFolder) -> None:
    """Removes the texts that a run's folder keeps, if it does; raises `RunStopped` where it cannot be written."""
    with writable(folder.path):
        for name in (_CHECKSUM, NAME):
            folder.files.remove(folder.path / name)


def damage_to_texts(folder: RunFolder) -> list[str]:
    """What is wrong with the texts in a folder, if they are there; every context is held against its name."""
    study = folder.study()
    try:
        found = _kept_in(folder, study)
    except DamagedItem as error:
        return [str(error)]
    extent = folder.extents[-1]
    is_whole = found is None or found.are_those_of(np.ndindex(extent["sets"], extent["permutations"]))
    return [] if is_whole else [str(damaged_texts(folder, "its tokens are not those of the run"))]


def recorded_folder(run: FinishedRun) -> RunFolder:
    """The folder of a run, as far as that had grown."""
    assert run.folder is not None
    whole = RunFolder.open(run.folder)
    return whole.at_extent(run.study.extent) or whole


def refuse_other_data(run: FinishedRun, task: Task, examples: Mapping[str, Examples]) -> None:
    """Raises `DataError` where task or data are not those that a run in a folder was made with."""
    assert run.folder is not None
    hashes = RunFolder.open(run.folder).plan["hashes"]
    if hashes.get("wording") != task.wording_hash():
        raise DataError(
            f"the wording of task {run.study.task!r} is not what {run.folder} was run with; put that task file back"
        )
    if hashes.get("train") != examples["train"].digest:
        raise other_data(run)


def has_other_data(path: Path) -> bool:
    """Whether the task or the data of the run in a folder are others now than it was made with; reads the data."""
    folder = RunFolder.open(path)
    given = folder.study()
    task = Task.load(given.task, given.data)
    examples, hashes = study_examples(resolved(given, task), task), folder.plan["hashes"]
    now = {"wording": task.wording_hash(), **{split: examples[split].digest for split in ("train", "test")}}
    return any(hashes.get(name) != digest for name, digest in now.items())


def other_data(run: FinishedRun) -> DataError:
    """That the data is not that of the run."""
    return DataError(
        f"the data of {run.study.task!r} is not what {run.folder} was run with, so its prompts cannot be told; put "
        "that back, or name its folder with the study's key 'data'"
    )


def tokenizer_at_hand(study: Study) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer of a study's model; None, with a note, where it cannot be had and no chat needs it."""
    if study.endpoint is not None:
        return TextTokenizer(), ()
    try:
        if study.model != "demo" and not Path(study.model).is_dir() and study.chat in (None, "none"):
            raise ModelError(f"{study.model!r} is no folder here")  # a hub id is not fetched for a comparison alone
        return model_tokenizer(study_model_folder(study, weights=False)), ()
    except ModelError as error:
        if study.chat not in (None, "none"):
            raise
        return None, (f"the tokens were not compared with those of the run: {str(error).split(';')[0]}",)


def _kept_in(folder: RunFolder, study: Study) -> RunPrompts | None:
    """The prompts that a folder keeps; None where none are, or those of a smaller extent, and `DamagedItem` where they
    are not those of its run."""
    path, checksum = folder.path / NAME, folder.path / _CHECKSUM
    if not (folder.files.has(path) and folder.files.has(checksum)):
        return None
    groups, own = _recorded(folder), recorded_own(folder)
    most_rows = (
        2 * sum(group.rows.size for group in groups)
        + (0 if own is None else 2 * own.size)
        + len(folder.table("queries"))
        + _MOST_OTHER_ROWS
    )
    try:
        raw = folder.files.read(path, MOST_OF_TABLE)
        if folder.files.read(checksum, _CHECKSUM_BYTES) != checksum_line(NAME, raw):
            raise ValueError("its content is not what its checksum says")
        texts = PromptTexts.of_table(table_of(path, raw, most_rows))
        shown = [group.rows for group in groups] if own is None else [own]
        used = {int(row) for rows in shown for row in np.unique(rows)}
        if not used <= texts.demonstrations.keys() or not _has_queries(texts, folder):
            return None
        if not _are_queries_of(texts, folder):
            raise ValueError("its queries are not those of the run")
    except (OSError, RunError, pa.ArrowException, ValueError, KeyError, TypeError, RecursionError) as error:
        if is_out_of_memory(error):
            raise
        raise damaged_texts(folder, " ".join(str(error).split())[:200]) from None
    return RunPrompts(texts, groups, study.endpoint is not None, own)


def damaged_texts(folder: RunFolder, reason: str) -> DamagedItem:
    """That the texts in a folder are not what they should be."""
    return DamagedItem(
        f"{folder.path / NAME} is damaged: {reason}; run the study again, which writes it anew (no result rests on it)"
    )


def _recorded(folder: RunFolder) -> tuple[OrderingRows, ...]:
    """The orderings in a folder's table."""
    extent = folder.extents[-1]
    shape = extent["sets"], extent["permutations"]
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in folder.table("demonstrations").to_pylist():
        groups.setdefault(tuple(row["shots"]), []).append(row)
    return tuple(
        OrderingRows(
            shots,
            np.array([row["examples"] for row in rows], dtype=np.int64).reshape(*shape, -1),
            np.array([row["contexts"] for row in rows], dtype=np.int64).reshape(*shape, -1),
        )
        for shots, rows in groups.items()
    )


def recorded_own(folder: RunFolder) -> NDArray[np.int64] | None:
    """Train rows of each test query's own demonstrations, best first, int64 [S, Q, K]; None where all share them.

    Raises `DamagedItem` for a table that has no such rows, or not for every rank."""
    table = folder.table("queries")
    if "demonstrations" not in table.column_names:
        return None
    ranks = folder.table("demonstrations")["examples"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    try:
        rows = np.array(table["demonstrations"].to_pylist(), dtype=np.int64).swapaxes(0, 1)
    except (ValueError, TypeError):  # lists of unequal lengths, or none
        rows = np.empty(0, dtype=np.int64)
    if rows.ndim != 3 or len(rows) != folder.extents[-1]["sets"] or not (ranks < rows.shape[2]).all():
        raise DamagedItem(f"{folder.path}: its queries lack demonstrations of their own; run the study again")
    return rows


def _drawn(design: Design, prompts: Prompts | None) -> tuple[OrderingRows, ...]:
    """The orderings of a run in memory."""
    found, place = [], 0
    for group in design.orderings:
        within = slice(place, place := place + len(group.shots))
        names = np.full((*group.rows.shape[:2], len(group.shots)), -1, dtype=np.int64)
        if prompts is not None:
            names = prompts.context_ids[prompts.context_of[:, :, within]]
        found.append(OrderingRows(group.shots, group.rows, names))
    return tuple(found)


def _has_queries(texts: PromptTexts, folder: RunFolder) -> bool:
    rows = folder.table("queries").select(["split", "query"]).to_pylist()
    return all(row["query"] < len(texts.queries.get(row["split"], ())) for row in rows)


def _are_queries_of(texts: PromptTexts, folder: RunFolder) -> bool:
    """Whether the queries have the contents that the run recorded."""
    for row in folder.table("queries").select(["split", "query", "content_hash"]).to_pylist():
        piece = texts.queries[row["split"]][row["query"]]
        said = piece.turns[0] if texts.chat else piece.text
        compared = compared_text(said, texts.choices.get((row["split"], row["query"]), ()))
        hashed = hashlib.sha256(compared.encode()).hexdigest()
        if row["split"] != CONTENT_FREE and hashed != row["content_hash"]:
            return False
    return True
