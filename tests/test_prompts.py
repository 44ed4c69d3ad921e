"""Prompts: whatever the tokenizer, every cell has the ids of its jointly tokenised text."""

import numpy as np
import pytest
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, greedy_tokenizer, make_rows, make_task, write_rows
from tokenizers import normalizers

from iclperm import Study, Task
from iclperm.errors import TokenizationError
from iclperm.prompts.design import draw
from iclperm.prompts.encode import prompt_tokens
from iclperm.prompts.render import prompt_text
from iclperm.prompts.seams import CHECKS, JoinChecks
from iclperm.prompts.tokenise import tokenise

TOKENIZERS = {"byte": byte_level_tokenizer, "dummy": dummy_prefix_tokenizer, "greedy": greedy_tokenizer}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in TOKENIZERS.items()}


def lay_out(path, tokenizer, scoring="loglikelihood", checks=CHECKS, **choices):
    task = Task.load(path)
    examples = {split: task.examples(split) for split in ("train", "test")}
    study = Study(**{"task": str(path), "sets": 2, "permutations": 3, "shots": [0, 1, 3], "queries": 6, **choices})
    design = draw(study, task, examples)
    prompts = tokenise(design, task, examples, tokenizer, study.seed, scoring=scoring, checks=checks)
    return (design, task, examples), prompts


def assert_every_cell_is_jointly_tokenised(parts, prompts, tokenizer, scoring="loglikelihood"):
    """The oracle: the whole text of every cell and label, tokenised at once."""
    apart = {(cell.context, cell.query): cell for cell in prompts.general}
    for cell in np.ndindex(*prompts.context_of.shape, len(prompts.queries)):
        text = prompt_text(*parts, cell=cell, scoring=scoring)
        context, query = int(prompts.context_of[cell[:3]]), cell[3]
        for label, continuation in enumerate(text.continuations):
            whole = tokenizer(text.context + text.query + continuation)["input_ids"]
            if (context, query) in apart:
                own = apart[context, query]
                ids = np.concatenate([own.prompt, own.continuations[label]])
            else:
                ids = np.concatenate([prompts.contexts[context], prompts.queries[query], prompts.continuations[label]])
            assert ids.tolist() == whole


@pytest.mark.parametrize("separator", ["\n\n", "\n", " ", "", ".\n\n"])
@pytest.mark.parametrize("cue", ["Colour:", "Colour: ", "Colour"])
@pytest.mark.parametrize("instruction", ["", "Name the colour."])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_cell_has_the_ids_of_its_whole_text(tmp_path, tokenizers, name, separator, cue, instruction):
    continuation = "{{ label }}" if cue.endswith(" ") else " {{ label }}"
    changes = {"separator": separator, "instruction": instruction, "continuation": continuation}
    path = make_task(tmp_path, query="Thing: {{ text }}\n" + cue, **changes)
    parts, prompts = lay_out(path, tokenizers[name])
    assert_every_cell_is_jointly_tokenised(parts, prompts, tokenizers[name])
    assert prompts.counts.num_general_cells == len(prompts.general)


def test_a_plain_task_stays_in_the_product(tmp_path, tokenizers):
    _, prompts = lay_out(make_task(tmp_path), tokenizers["byte"])
    counts = prompts.counts
    assert (counts.num_failed_seams, counts.num_failed_prompts, counts.num_general_cells) == (0, 0, 0)
    assert counts.num_seams > 0
    assert counts.num_checked_prompts > 0
    assert counts.num_resplit_queries == 0
    assert prompts.contexts[0].tolist() == [0]  # k = 0: BOS alone, and exactly one
    assert all((ids == 0).sum() == 1 and ids[0] == 0 for ids in prompts.contexts)
    assert not any((ids == 0).any() for ids in prompts.queries)


def test_a_cue_that_merges_with_the_label_is_split_before_the_merge(tmp_path, tokenizers):
    path = make_task(tmp_path, query="Thing: {{ text }}\nColour: ", continuation="{{ label }}")
    _, prompts = lay_out(path, tokenizers["byte"])
    assert prompts.counts.num_resplit_queries == len(prompts.queries)
    assert prompts.counts.num_general_cells == 0
    texts = [tokenizers["byte"].decode(ids) for ids in prompts.continuations]
    assert texts == [" Red", " Green", " Blue"]


def test_a_dummy_prefix_sends_only_zero_shot_cells_to_the_general_path(tmp_path, tokenizers):
    _, prompts = lay_out(make_task(tmp_path), tokenizers["dummy"])
    zero_shot = int(prompts.context_of[0, 0, 0])
    assert [(cell.context, cell.query) for cell in prompts.general] == [(zero_shot, query) for query in range(6)]


def test_parts_that_merge_leave_the_product_counted(tmp_path, tokenizers):
    parts, prompts = lay_out(make_task(tmp_path, separator=""), tokenizers["greedy"])
    last = [parts[1].words[parts[2]["train"].labels[row]] for row in parts[0].orderings[0].rows[:, :, 0].ravel()]
    assert {"Red", "Green"} <= set(last)
    ends_in_red = np.array(last) == "Red"
    after_red = set(prompts.context_of[:, :, 1].ravel()[ends_in_red].tolist())
    one_shot = set(prompts.context_of[:, :, 1].ravel().tolist())
    assert prompts.counts.num_failed_seams > 0
    # The product takes one kind of seam, whichever it is; all cells of the other kind are apart.
    assert {cell.context for cell in prompts.general} & one_shot in (after_red, one_shot - after_red)


def test_of_many_seams_some_are_checked_and_all_where_one_fails(tmp_path, tokenizers):
    wording = {"demonstration": "{{ text }} is {{ label }}", "query": "{{ text }} is"}
    joined = tmp_path / "joined"
    joined.mkdir()
    paths = {"byte": make_task(tmp_path, **wording), "greedy": make_task(joined, separator="")}
    whole = {name: lay_out(path, tokenizers[name])[1] for name, path in paths.items()}
    assert whole["byte"].counts.num_failed_seams == 0 < whole["greedy"].counts.num_failed_seams
    one_seam = JoinChecks(seams=1)
    _, sampled = lay_out(paths["byte"], tokenizers["byte"], checks=one_seam)
    assert 3 <= sampled.counts.num_seams < whole["byte"].counts.num_seams
    parts, exhaustive = lay_out(paths["greedy"], tokenizers["greedy"], checks=one_seam)
    assert exhaustive.counts == whole["greedy"].counts
    assert_every_cell_is_jointly_tokenised(parts, exhaustive, tokenizers["greedy"])


def test_contexts_are_distinct_and_prefixes_of_their_rows(tmp_path, tokenizers):
    _, prompts = lay_out(make_task(tmp_path), tokenizers["byte"], sets=3, permutations=6)
    assert len({ids.tobytes() for ids in prompts.contexts}) == len(prompts.contexts) == len(set(prompts.context_ids))
    assert len(set(prompts.context_of[:, :, 0].ravel())) == 1  # k = 0 is one context
    assert len(prompts.rows) == 18
    np.testing.assert_array_equal(np.concatenate(prompts.marked), prompts.context_of.ravel())
    for row, marks, contexts in zip(prompts.rows, prompts.marks, prompts.marked, strict=True):
        for mark, context in zip(marks, contexts, strict=True):
            np.testing.assert_array_equal(prompts.contexts[context], row[:mark])


def test_each_number_of_shots_may_have_orderings_of_its_own(tmp_path, tokenizers):
    choices = {"sets": 2, "permutations": 5, "shots": [0, 3, 4], "resample": "per_k"}
    parts, prompts = lay_out(make_task(tmp_path), tokenizers["byte"], **choices)
    assert [group.shots for group in parts[0].orderings] == [(0, 3), (4,)]
    assert prompts.context_of.shape == (2, 5, 3)
    assert_every_cell_is_jointly_tokenised(parts, prompts, tokenizers["byte"])
    three, four = (parts[0].orderings[group].sets for group in (0, 1))
    assert not any(set(small) <= set(large) for small, large in zip(three.tolist(), four.tolist(), strict=True))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_shown_are_those_scored(tmp_path, tokenizers, name):
    parts, prompts = lay_out(make_task(tmp_path), tokenizers[name])
    apart = {(cell.context, cell.query): cell for cell in prompts.general}
    for cell in [(0, 0, 0, 0), (1, 2, 1, 3), (1, 1, 2, 5)]:
        context, query = int(prompts.context_of[cell[:3]]), cell[3]
        shown = prompt_tokens(prompt_text(*parts, cell=cell), tokenizers[name])
        own = apart.get((context, query))
        joined = np.concatenate([prompts.contexts[context], prompts.queries[query]])
        scored = (joined, prompts.continuations) if own is None else (own.prompt, own.continuations)
        assert tokenizers[name].convert_tokens_to_ids(shown.pieces) == scored[0].tolist()
        labels = [tokenizers[name].convert_tokens_to_ids(pieces) for pieces in shown.labels]
        assert labels == [ids.tolist() for ids in scored[1]]
        assert shown.opening == ["<s>"]
        if own is None:
            assert shown.num_context == len(prompts.contexts[context])


def test_only_zero_shots(tmp_path, tokenizers):
    parts, prompts = lay_out(make_task(tmp_path), tokenizers["dummy"], shots=0, sets=1, permutations=1)
    assert len(prompts.contexts) == 1
    assert prompts.counts.num_general_cells == 0
    assert_every_cell_is_jointly_tokenised(parts, prompts, tokenizers["dummy"])


def test_fed_tokens_count_all_but_the_last_label_token(tmp_path, tokenizers):
    _, prompts = lay_out(make_task(tmp_path), tokenizers["byte"])
    longest = max(len(ids) for ids in prompts.contexts)
    label = max(len(ids) for ids in prompts.continuations)
    assert prompts.fed_tokens().tolist() == [longest + len(query) + label - 1 for query in prompts.queries]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_that_is_written_on_is_fed_whole(tmp_path, tokenizers, name):
    path = make_task(tmp_path, query="Thing: {{ text }}\nColour: ")
    parts, prompts = lay_out(path, tokenizers[name], "generate")
    assert_every_cell_is_jointly_tokenised(parts, prompts, tokenizers[name], "generate")
    assert [ids.tolist() for ids in prompts.continuations] == [[]]
    assert all([ids.tolist() for ids in cell.continuations] == [[]] for cell in prompts.general)
    assert prompts.counts.num_resplit_queries == 0
    if not prompts.general:
        longest = max(len(ids) for ids in prompts.contexts)
        assert prompts.fed_tokens(10).tolist() == [longest + len(query) + 9 for query in prompts.queries]


def test_the_first_token_of_each_label_can_be_scored_alone(tmp_path, tokenizers):
    wording = {"query": "Thing: {{ text }}\nColour:\n", "continuation": "{{ label }}"}
    path = make_task(tmp_path, labels={"Red": "Crimson", "Green": "Emerald", "Blue": "Navy"}, **wording)
    _, whole = lay_out(path, tokenizers["byte"])
    _, first = lay_out(path, tokenizers["byte"], "first_token")
    assert max(map(len, whole.continuations)) > 1
    assert [ids.tolist() for ids in first.continuations] == [[int(ids[0])] for ids in whole.continuations]
    assert [ids.tolist() for ids in first.queries] == [ids.tolist() for ids in whole.queries]
    assert first.counts == whole.counts


def test_labels_that_begin_with_one_token_cannot_be_told_by_it(tmp_path, tokenizers):
    path = make_task(tmp_path, continuation=" it is {{ label }}")
    with pytest.raises(TokenizationError, match="' it is Red' and ' it is Green' begin with the same token; set sco"):
        lay_out(path, tokenizers["byte"], "first_token")


def test_a_label_without_a_token_is_refused(tmp_path, tokenizers):
    path = make_task(tmp_path, labels={"Red": "\u200b", "Green": "Green", "Blue": "Blue"}, continuation="{{ label }}")
    stripping = byte_level_tokenizer()
    stripping.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    with pytest.raises(TokenizationError, match=r"makes no token of the label '.u200b'; change its word"):
        lay_out(path, stripping)


def test_a_special_token_in_the_data_is_refused(tmp_path, tokenizers):
    path = make_task(tmp_path)
    rows = make_rows(2, 30)
    write_rows(tmp_path / "test.jsonl", [{**row, "text": row["text"] + " </s>"} for row in rows])
    with pytest.raises(TokenizationError, match="holds a special token of this tokenizer; remove it"):
        lay_out(path, tokenizers["byte"])


def test_labels_that_the_tokenizer_cannot_tell_apart_are_refused(tmp_path, tokenizers):
    path = make_task(tmp_path, labels={"Red": "東", "Green": "西", "Blue": "Blue"})
    with pytest.raises(TokenizationError, match="the labels ' 東' and ' 西' have the same tokens"):
        lay_out(path, tokenizers["dummy"])


def test_a_tokenizer_without_offsets_is_refused(tmp_path):
    class Slow:
        is_fast = False

    with pytest.raises(TokenizationError, match="has no offsets"):
        lay_out(make_task(tmp_path), Slow())


def test_files_that_are_no_tokenizer_after_all_are_refused(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.model_max_length = "x"  # as a strange tokenizer_config.json has it
    with pytest.raises(TokenizationError, match=r"the tokenizer fails on plain text \(.*\); repair its files, or use"):
        lay_out(make_task(tmp_path), tokenizer)
