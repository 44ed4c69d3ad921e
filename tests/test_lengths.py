"""How long the prompts of a task are for a model: every row counted one by one."""

from tiny import byte_level_tokenizer, make_model, make_task

from iclperm import Task
from iclperm.runs.lengths import prompt_lengths


def test_lengths_are_those_of_the_rows_one_by_one(tmp_path):
    tokenizer = byte_level_tokenizer()

    def num_tokens(text):
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    make_model(tmp_path / "model", tokenizer, window=150)
    task = Task.load(make_task(tmp_path, instruction="Name the colour.", shots=3))
    rows = [
        len(
            tokenizer(
                task.render_demonstration(fields, int(label)) + task.separator, add_special_tokens=False
            ).input_ids
        )
        for split in ("train", "test")
        for fields, label in zip(task.examples(split).fields, task.examples(split).labels, strict=True)
    ]
    rows.sort()
    found = prompt_lengths(task, str(tmp_path / "model"))
    opening = num_tokens(task.opening()) + 1
    median = rows[len(rows) // 2]
    assert (found.window, found.longest, found.median) == (150, rows[-1], median)
    assert found.whole == opening + rows[-1] + sum(rows[-3:])
    assert found.num_too_long == sum(row > 150 - opening - 3 * median for row in rows)
