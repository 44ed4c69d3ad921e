"""Files of which a part can be read, or none: what is left out is named, what is refused has a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import iclperm
from iclperm.errors import DataError
from iclperm.external import Tensor, describe, load


class TestWhatOtherProgramsWrite:
    """Files that no reader can take as they are: refused in a line that says what to write instead."""

    ROWS = "set,permutation,query,correct,gold\n" + "".join(
        f"{s},{p},{q},{(s + p + q) % 2},Téch\n" for s in range(2) for p in range(2) for q in range(20)
    )

    def test_another_encoding(self, tmp_path: Path) -> None:
        file = tmp_path / "latin.csv"
        file.write_bytes(self.ROWS.encode("latin-1"))
        with pytest.raises(DataError, match="it is not UTF-8; save it as UTF-8"):
            load(file)

    def test_names_of_rows_without_a_name_of_their_own_as_r_writes_them(self, tmp_path: Path) -> None:
        first, *rows = self.ROWS.splitlines()
        file = tmp_path / "table.csv"
        file.write_text("\n".join([first, *(f'"{n}",{row}' for n, row in enumerate(rows, 1))]) + "\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"first line has 5 names, a row 6 cells; .* row.names = FALSE"):
            load(file)

    def test_a_comment_above(self, tmp_path: Path) -> None:
        file = tmp_path / "comment.csv"
        file.write_text("# made by me\n" + self.ROWS, encoding="utf-8")
        with pytest.raises(DataError, match="first line has 1 cells, a row 5; delete lines that are no rows"):
            load(file)

    def test_a_sample_that_failed_is_a_missing_answer(self, tmp_path: Path) -> None:
        for name, failed in (("a", {3, 7}), ("b", set())):
            rows = [
                {"doc_id": q, "doc_hash": f"h{q}", "acc": None if q in failed else float(q % 2), "task": "t"}
                for q in range(30)
            ]
            (tmp_path / f"samples_t_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        one = load(tmp_path / "samples_t_a.jsonl")
        assert one.state is not None
        assert np.flatnonzero(one.state[0]).tolist() == [3, 7]
        assert "2 of 30 answers are missing" in one.notes
        both = load([tmp_path / "samples_t_a.jsonl", tmp_path / "samples_t_b.jsonl"])
        assert both.state is not None
        assert [np.flatnonzero(row).tolist() for row in both.state] == [[3, 7], []]
        assert both.values[1, 3] == 1


class TestOrderingsWithoutAnAnswer:
    """What has no answer at all is left out and named; the rest is told."""

    ITEMS = (np.random.default_rng(0).random((5, 4, 2, 40)) < 0.6).astype(np.uint8)

    def tensor(self, empty: list[tuple[Any, ...]], **names: Any) -> Tensor:
        state = np.zeros(self.ITEMS.shape, np.uint8)
        for place in empty:
            state[place] = 1
        return Tensor(self.ITEMS, "SPKQ", state, shots=(2, 4), title="a file", **names)

    def test_a_set_of_which_one_ordering_lacks_all(self) -> None:
        found = describe(self.tensor([(1, 2, 1)], sets=("a", "b", "c", "d", "e")))
        assert found.shape == (4, 4, 2, 40)
        assert found.notes == ("set b has no answer under some permutations: it is left out",)
        expected = describe(Tensor(np.delete(self.ITEMS, 1, 0), "SPKQ", shots=(2, 4), title="a file"))
        assert found.to_dict()["sensitivity"]["mean"] == expected.to_dict()["sensitivity"]["mean"]
        assert found.conclusion() == expected.conclusion()

    def test_a_permutation_that_no_set_answered(self) -> None:
        found = describe(self.tensor([(slice(None), 3)]))
        assert found.shape == (5, 3, 2, 40)
        assert found.notes == ("permutation 3 has no answer: it is left out",)

    def test_a_study_of_which_nothing_would_be_left_is_refused(self) -> None:
        with pytest.raises(DataError, match="has no answer to any query: leave it out"):
            describe(self.tensor([(place,) for place in range(4)]))

    def test_a_comparison_goes_on_too(self, tmp_path: Path) -> None:
        for name, lacks in (("one", 1), ("other", None)):
            rows = [
                {"set": s, "permutation": p, "query": q, "correct": int(self.ITEMS[s, p, 0, q])}
                for s, p, q in np.ndindex(5, 4, 40)
                if s != lacks or p
            ]
            pd.DataFrame(rows).to_csv(tmp_path / f"{name}.csv", index=False)
        found = iclperm.compare([tmp_path / "one.csv", tmp_path / "other.csv"], shared=["sets", "queries"])
        assert found.studies[0].shape == (4, 4, 40)
        assert any("set 1 has no answer under some permutations" in line for line in found.warnings)
