"""What a search found, of answers without predictions, and how its figure says it."""

import numpy as np

from iclperm.studies.search import Answers, search_findings
from iclperm.studies.search_findings import _tick_words


def test_right_and_wrong_alone_are_searched_by_dev_accuracy() -> None:
    rng = np.random.default_rng(3)
    dev, test = (rng.integers(0, 2, (3, 4, size)) for size in (30, 20))
    found = search_findings(Answers(test), Answers(dev), resamples=5)
    full = search_findings(Answers(test), Answers(dev, predictions=dev), resamples=5)
    assert [each.name for each in found.criteria] == ["dev_accuracy"]
    assert found.conclusion() == full.conclusion()
    assert (found.scores == dev.mean(axis=2)).all()


def test_sizes_that_would_run_into_each_other_are_not_both_written() -> None:
    sizes = np.array([50, 100, 500, 600])
    assert _tick_words(sizes) == ["50", "100", "", "600"]
