"""A run by workers, as its driver sees it: parts are dealt out, answers gathered, and lost workers replaced."""

from __future__ import annotations

import queue
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Generic, TypeVar

import pyarrow as pa

from iclperm import errors
from iclperm.errors import RunError, RunStopped
from iclperm.runs.answering import Asked, ModelUse
from iclperm.runs.costs import part_flops
from iclperm.runs.parts import NAMED_LATER, other_numerics
from iclperm.runs.scorers import Answered, Claims, enough_memory, libraries_of, rows_of
from iclperm.runs.work import Work
from iclperm.tasks.answers import Checker
from iclperm.workers.messages import packed, part_message, plan_message, unpacked
from iclperm.workers.pool import Member, Pool
from iclperm.workers.shares import Shares

Place = TypeVar("Place")
_MOST_LOSSES = 3  # for each worker, with no part finished between
_SECONDS_TO_START = 900.0


class Workers:
    """Answers a run by the workers of a pool, which another run may have used before.

    ``wants_digest`` has each worker say what its model's files are, as those of other machines may be others. The first
    worker that is ready says by which numerics the run is computed, unless parts of it say so already (`expect`); one
    that differs is refused, unless ``is_mixed``.
    """

    def __init__(self, work: Work, pool: Pool, *, is_mixed: bool, wants_digest: bool = False) -> None:
        self.libraries = libraries_of(work)
        self.replies: dict[str, int] = {}
        self._work = work
        self._pool = pool
        self._is_mixed = is_mixed
        self._wants_digest = wants_digest
        self._run = 0
        self._all: list[Member] = []
        self._idle: list[Member] = []
        self._shares = Shares(())
        self._numerics: dict[str, Any] | None = None
        self._num_losses = 0

    def expect(self, numerics: Mapping[str, Any]) -> None:
        """What parts of the run were computed with: a worker that differs is refused."""
        if not self._is_mixed:
            self._numerics = dict(numerics)

    @property
    def numerics(self) -> dict[str, Any]:
        """Those of the first worker that is ready, unless they are known; starts them and waits for it."""
        self._begin()
        while self._numerics is None:
            self._next_answer()
        return self._numerics

    @property
    def tokens(self) -> int:
        """Forwarded by all workers for this run, as they said with their last parts."""
        return sum(member.tokens for member in self._all)

    @property
    def workers(self) -> list[dict[str, Any]]:
        """See `iclperm.runs.scorers.Scorer`."""
        now = time.monotonic()
        return [
            {
                "name": f"worker {member.number}",
                "host": member.host,
                "pid": member.pid,
                "parts": member.num_parts,
                "seconds": round(now - member.began, 3),
                "lost": member.is_lost or member.is_refused,
            }
            for member in self._all
            if member.host
        ]

    def tables(self, parts: Sequence[int], claims: Claims, checker: Checker | None) -> Generator[Answered]:
        """See `iclperm.runs.scorers.Scorer`. Parts come in the order in which they are answered."""
        self._begin()
        self._shares = Shares(parts, dict(enumerate(part_flops(self._work).tolist())))
        taken: set[int] = set()
        try:
            while True:
                self._deal(claims, taken)
                if self._shares.is_done:
                    return
                if (answer := self._next_answer()) is None:
                    continue
                member, part, said = answer
                if self._shares.answered(part):
                    self._num_losses = 0
                    member.num_parts += 1
                    self._deal(claims, taken)  # before the rows are made and written: nobody is to wait for that
                    assert member.numerics is not None
                    yield Answered(part, rows_of(self._work, part, said, checker), member.numerics)
                    taken.discard(part)
                    claims.release(part)
        finally:
            for part in taken:
                claims.release(part)

    def close(self) -> None:
        """Nothing to do: the workers are the pool's."""

    def _begin(self) -> None:
        if not self._run:
            self._pool.begin(self._setup)
            self._run = self._pool.run
            self._all = [*self._pool.members]

    def _setup(self, run: int) -> list[bytes]:
        """What tells a worker of this run."""
        products = self._work.products
        use = asdict(ModelUse.of(self._work.setting))
        head = {"is": "load", "run": run, "use": use, "wants_digest": self._wants_digest, "num_plans": len(products)}
        return [packed(head), *(plan_message(self._work, product) for product in products)]

    def _deal(self, claims: Claims, taken: set[int]) -> None:
        """Gives each idle worker a part, as long as there are some: where there is none for one, there is for none."""
        while self._idle and (part := self._shares.next(self._idle[0])) is not None:
            if part in taken or claims.take(part):
                taken.add(part)
                self._idle.pop(0).outbox.put(part_message(Asked.of(self._work, part)))
            else:
                self._shares.drop(part)

    def _next_answer(self) -> tuple[Member, int, pa.Table] | None:
        """Waits for the next message of a worker; None where it is no answer.

        Raises what the worker raised, and `RunStopped` where workers are lost again and again, or none comes up.
        """
        is_none_up = not any(member.numerics for member in self._all if not member.is_lost)
        try:
            member, message = self._pool.next(_SECONDS_TO_START if is_none_up else None)
        except queue.Empty:
            raise RunStopped(
                f"no worker came up within {_SECONDS_TO_START:.0f} seconds; see that there is room for one, then run "
                "the same command to continue"
            ) from None
        if member.is_lost:
            return None
        if message is None:
            if member.is_refused:
                self._pool.end(member)
            else:
                self._replace(member)
            return None
        head, table = unpacked(message)
        is_of_this_run = head["run"] == self._run
        if head["is"] == "failed":
            if is_of_this_run:
                self._raise(member, head)
            self._replace(member)  # it ended by the run before
            return None
        if not is_of_this_run:
            return None
        if head["is"] == "ready":
            self._admit(member, head)
            return None
        assert table is not None
        member.tokens = head["tokens"]
        self._idle.append(member)
        return member, head["part"], table

    def _admit(self, member: Member, head: dict[str, Any]) -> None:
        """Has a worker that is ready take part, unless its answers could be others."""
        member.host, member.pid, member.began = head["host"], head["pid"], time.monotonic()
        if problem := self._difference(head):
            member.is_refused = True
            words = f"{member.name} is refused: {problem}"
            if all(each.is_refused or each.is_lost for each in self._all):
                raise RunError(words)
            warnings.warn(words, stacklevel=2)
            return
        member.numerics = head["numerics"]
        there = head["numerics"]
        if self._numerics is None:
            self._numerics = there
        elif not self._is_mixed:  # of parts of an older version, which named less
            newer = NAMED_LATER & there.keys() - self._numerics.keys()
            self._numerics = {**self._numerics, **{name: there[name] for name in newer}}
        self._idle.append(member)

    def _difference(self, head: dict[str, Any]) -> str:
        """Why a worker's answers could be others than those of this run; empty where they are the same."""
        if head["version"] != (own := version("iclperm")):
            return f"it has iclperm {head['version']}, and this is {own}; install the same there"
        hashes = self._work.setting.identity["hashes"]
        if head["digests"] is not None and head["digests"] != [hashes["model"], hashes.get("adapter")]:
            return "the files of the model are others there; copy the same to all machines"
        ours = head["numerics"] if self._numerics is None or self._is_mixed else self._numerics
        if (key := other_numerics(ours, head["numerics"])) is not None:
            return (
                f"its {key} is {head['numerics'].get(key)}, that of the run {ours.get(key)}, and results could differ "
                "in the last bits; accept that with --mixed, or make them equal"
            )
        return ""

    def _raise(self, member: Member, head: dict[str, Any]) -> None:
        """Raises the error that ended a worker."""
        self._pool.end(member)
        with enough_memory(self._work):
            if head["error"] == "MemoryError":
                raise MemoryError(head["words"])
            kind = getattr(errors, head["error"], RunError)
            raise (kind if kind.__init__ is errors.IclpermError.__init__ else RunError)(
                f"{member.name}: {head['words']}"
            )

    def _replace(self, member: Member) -> None:
        """Has another worker stand in for one that is lost; its part is done again."""
        why = member.why()
        self._shares.lost(member)
        if member in self._idle:
            self._idle.remove(member)
        self._num_losses += 1
        replacement = self._pool.replace(member)
        if self._num_losses > _MOST_LOSSES * self._pool.count:
            raise RunStopped(
                f"{self._num_losses} workers were lost with no part finished between, the last of them {member.name}: "
                f"{why}; run the same command to continue"
            )
        self._all.append(replacement)


class PoolOf(Generic[Place]):
    """Makes the `Workers` of one run after the other: by one pool, as long as their places stay equal.

    ``places`` says where the workers of a run's work are, ``make`` makes the pool that is there. Both may raise. Ends
    its workers when it is closed.
    """

    def __init__(
        self,
        places: Callable[[Work], Place],
        make: Callable[[Place], Pool],
        *,
        is_mixed: bool,
        wants_digest: bool = False,
    ) -> None:
        self._places = places
        self._make = make
        self._choices = {"is_mixed": is_mixed, "wants_digest": wants_digest}
        self._there: tuple[Place, Pool] | None = None

    def __call__(self, work: Work) -> Workers:
        """The workers for a run's work; they turn to it at its first part."""
        place = self._places(work)
        if self._there is None or self._there[0] != place:
            self._end_pool()
            self._there = place, self._make(place)
        return Workers(work, self._there[1], **self._choices)

    def close(self) -> None:
        """Ends all workers at once; may be called again."""
        self._end_pool()

    def _end_pool(self) -> None:
        if self._there is not None:
            self._there[1].close()
            self._there = None
