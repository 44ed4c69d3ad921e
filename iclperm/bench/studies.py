"""A study of one's own as a workload: the prompts of its plan, or a share of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from iclperm.bench.cases import share_of
from iclperm.bench.peers.protocol import BenchWorkload, Ids
from iclperm.engine.plan import ContextPaths
from iclperm.engine.tree import Rows
from iclperm.errors import ConfigError
from iclperm.runs.layout import continuations_of, lay_out, paths_of
from iclperm.runs.setting import ResolvedStudy
from iclperm.study import kinds
from iclperm.study.study import Study

_MOST_NEW_TOKENS = 128


@dataclass(frozen=True)
class StudyCase:
    """The contexts of a study before its queries, as its plan has them.

    ``num_cells`` are all prompts of the study, ``num_distinct`` their distinct tokens; those outside ``paths`` x
    ``queries`` are not measured. Rows of ``paths`` are orderings, set by set, of which the first ``num_paths`` are
    taken, before the first ``num_queries`` queries.
    """

    name: str
    about: str
    paths: ContextPaths
    queries: tuple[Ids, ...]
    labels: tuple[Ids, ...]
    num_cells: int
    num_distinct: int
    new_tokens: int
    model: Path
    num_paths: int
    num_queries: int

    @classmethod
    def of(cls, study: Study, name: str) -> StudyCase:
        """Raises ConfigError for what has no one plan, or no model of its own, and what `iclperm.plan` raises."""
        if study.endpoint is not None:
            raise ConfigError(
                f"{name} asks {study.endpoint.model!r} behind an API, which the peers do not run; give --model a folder"
            )
        if study.adapter is not None:
            raise ConfigError(
                f"{name} has an adapter ({study.adapter}), which no peer is given here; merge it into a folder first "
                "(merge_and_unload(), then save_pretrained)"
            )
        if study.is_per_query:
            raise ConfigError(
                f"{name} gives every query its own demonstrations, which no peer is asked here; give another"
            )
        if kinds.named(study.kind).stages is not None:
            raise ConfigError(f"{name} is a {study.kind}, of several runs; give one of the folders inside its own")
        work = lay_out(ResolvedStudy.of(study))
        if work.prompts.choices is not None:
            raise ConfigError(f"{name} gives every query its own choices, which no peer is asked here; give another")
        products = [product for growth in work.growths for product in growth.products]
        if not products:
            raise ConfigError(f"{name} has no prompts that share contexts and queries; nothing of it can be measured")
        product = max(products, key=lambda each: len(each.contexts) * len(each.queries))
        paths = paths_of(work.prompts, product)
        queries = tuple(work.prompts.queries[query] for query in product.queries)
        setting = work.setting
        assert setting.model is not None
        study = setting.study
        new_tokens = min(setting.max_new_tokens, _MOST_NEW_TOKENS) if setting.is_generated else 0
        num_prompts = len(product.contexts) * len(product.queries)
        return cls(
            name=name,
            about=f"{study.sets} sets x {study.permutations} orders, k={_listed(study)}, of {setting.task.name}",
            paths=paths,
            queries=queries,
            labels=tuple(np.asarray(ids, np.int32) for ids in continuations_of(setting, work.prompts)),
            num_cells=sum(growth.num_cells for growth in work.growths),
            num_distinct=product.plan.tokens_unique + num_prompts * max(new_tokens - 1, 0),
            new_tokens=new_tokens,
            model=setting.model,
            num_paths=len(paths.rows),
            num_queries=len(queries),
        )

    @property
    def num_prompts(self) -> int:
        """Prompts that are measured."""
        return int(self.paths.marks.offsets[self.num_paths]) * self.num_queries

    @property
    def what(self) -> str:
        share = self.num_prompts / self.num_cells
        part = "all prompts" if share == 1 else f"{100 * share:.3g} % of the prompts"
        written = f", {self.new_tokens} new tokens each" if self.new_tokens else f", {len(self.labels)} labels"
        return f"{part} of a study of {self.about}{written}"

    @cached_property
    def digest(self) -> str:
        """Of all that is measured when it is whole."""
        found = hashlib.sha256(str(self.new_tokens).encode())
        for rows in (self.paths.rows, self.paths.marks, Rows.of(self.queries), Rows.of(self.labels)):
            found.update(rows.tokens.tobytes() + rows.offsets.tobytes())
        return found.hexdigest()[:8]

    def scaled(self, scale: float) -> StudyCase:
        """About that share of the work: fewer orderings, then fewer queries."""
        paths, queries = share_of(scale, len(self.paths.rows), len(self.queries))
        return replace(self, num_paths=paths, num_queries=queries)

    def build(self, vocab_size: int, seed: int = 0) -> BenchWorkload:
        """The prompts; they have been drawn by the study."""
        rows, marks = ([of[number] for number in range(self.num_paths)] for of in (self.paths.rows, self.paths.marks))
        cells = np.stack(np.divmod(np.arange(self.num_prompts), self.num_queries), axis=1)
        return BenchWorkload(
            tuple(rows), tuple(marks), self.queries[: self.num_queries], self.labels, cells, self.new_tokens
        )

    def distinct(self, vocab_size: int, seed: int = 0) -> int:
        """Tokens that have to be forwarded for all contexts and queries, as they were planned."""
        return self.num_distinct


def _listed(study: Study) -> str:
    shots = study.shots if isinstance(study.shots, list) else [study.shots]
    return ", ".join(map(str, shots)) if len(shots) <= 6 else f"{shots[0]} to {shots[-1]}"
