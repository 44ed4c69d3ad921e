"""Studies of several runs whose answers are generated, here or behind an API: one budget, one bill, nothing hidden."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from faulty_server import faulty_server
from tiny import make_rows, write_rows

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.endpoint.ledger import Ledger
from iclperm.errors import ConfigError, RunError, RunStopped
from iclperm.studies.generation import findings
from iclperm.study.states import UNPARSED

SIZES = {"sets": 2, "permutations": 4, "shots": 3, "queries": 6, "dev_queries": 6, "seed": 4}
FEW = {**SIZES, "permutations": 2, "queries": 4, "dev_queries": 4}
RULES = [{"name": "a letter", "pattern": "[A-D]"}, {"name": "a digit", "pattern": "[0-9]"}]


def write_task(folder, name, **changes):
    """A task file with its data; an answer is the first of some letters or a digit."""
    for split, count in (("train", 60), ("dev", 30), ("test", 30)):
        write_rows(folder / f"{split}.jsonl", make_rows(["train", "dev", "test"].index(split), count))
    content = {
        "name": name,
        "data": {split: f"{split}.jsonl" for split in ("train", "dev", "test")},
        "fields": {"text": "text", "topic": "label"},
        "answer": {"field": "label", "check": "exact", "rules": RULES},
        "demonstration": f"{name}: {{{{ text }}}}\nAnswer: {{{{ topic }}}}",
        "query": f"{name}: {{{{ text }}}}\nAnswer:",
        "max_new_tokens": 3,
        "shots": 3,
        **changes,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({key: value for key, value in content.items() if value}))
    return str(folder / f"{name}.yaml")


@pytest.fixture
def tasks(tmp_path):
    return [write_task(tmp_path, name) for name in ("News", "Article")]


def behind(server, **choices):
    return {"base_url": server.url, "model": server.model, "concurrency": 1, **choices}


def transfer(tasks, **choices):
    return Study(kind="transfer", tasks=tasks, **{**(FEW if "endpoint" in choices else SIZES), **choices})


def test_a_budget_is_of_all_runs_together_and_can_be_raised(tasks, tmp_path):
    with faulty_server() as server:
        planned = iclperm.plan(transfer(tasks, endpoint=behind(server)))
        needed = [part.bill.spent.requests for part in planned.values()]
        assert needed == [2 * 2 * 8] * 2
        tight = behind(server, max_requests=needed[0] + 5)
        with pytest.raises(RunStopped, match="max_requests"):
            iclperm.run(transfer(tasks, endpoint=tight), tmp_path / "run")
        assert server.paid.total() == needed[0] + 5
        with pytest.raises(RunStopped, match="max_requests"):
            iclperm.run(transfer(tasks, endpoint=tight), tmp_path / "run")
        assert server.paid.total() == needed[0] + 5
        prices = {"input": 1.0, "output": 2.0}
        wider = {**tight, "max_requests": sum(needed), "concurrency": 4, "timeout_s": 30.0, "prices": prices}
        run = iclperm.run(transfer(tasks, endpoint=wider), tmp_path / "run")
        assert server.paid.total() == sum(needed)
        assert set(server.paid.values()) == {1}
        assert iclperm.open_run(tmp_path / "run").digest == run.digest
        assert iclperm.open_run(tmp_path / "run").study.endpoint.max_requests == sum(needed)
        with pytest.raises(RunError, match=re.escape("the endpoint's temperature is 0.0 there and 1.0 here")):
            iclperm.run(transfer(tasks, endpoint={**wider, "temperature": 1.0}), tmp_path / "run")
    paid = [Ledger(tmp_path / "run" / name).spent.requests for name in ("News", "Article")]
    assert paid == needed


def test_a_run_of_a_study_continued_by_hand_keeps_to_the_budget(tasks, tmp_path):
    with faulty_server() as server:
        tight = behind(server, max_requests=40)
        with pytest.raises(RunStopped, match="max_requests"):
            iclperm.run(transfer(tasks, endpoint=tight), tmp_path / "run")
        alone = Study(kind="search", task=tasks[1], endpoint=tight, **FEW)
        with pytest.raises(RunStopped, match=re.escape("max_requests (41 of 40)")):
            iclperm.run(alone, tmp_path / "run" / "Article")
        assert server.paid.total() == 40


def test_a_budget_of_several_runs_needs_a_folder(tasks):
    with faulty_server() as server:
        with pytest.raises(ConfigError, match="max_tokens is for all runs of a transfer together; give a run folder"):
            iclperm.run(transfer(tasks, endpoint=behind(server, max_tokens=10**6)))
        assert not server.seen


def test_the_plan_of_several_runs_ends_in_their_bill(tasks, tmp_path):
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "prices": {"input": 1.0, "output": 10.0}}
    (tmp_path / "study.yaml").write_text(transfer(tasks, endpoint=endpoint).to_yaml())
    planned = iclperm.plan(transfer(tasks, endpoint=endpoint))
    done = CliRunner().invoke(cli.cli, ["plan", str(tmp_path / "study.yaml")], standalone_mode=False)
    assert done.exception is None
    together = done.stdout.split("Together")[1]
    bills = [part.bill for part in planned.values()]
    assert re.search(rf"requests +{sum(bill.spent.requests for bill in bills):,}\s", together)
    assert f"{sum(bill.cost for bill in bills):,.4g}" in together
    assert re.search(r"tokens of replies +at most", together)
    assert "estimated time" not in together
    free = {key: value for key, value in endpoint.items() if key != "prices"}
    (tmp_path / "study.yaml").write_text(transfer(tasks, endpoint=free).to_yaml())
    done = CliRunner().invoke(cli.cli, ["plan", str(tmp_path / "study.yaml")], standalone_mode=False)
    assert "bill" in (together := done.stdout.split("Together")[1])
    assert "not known: give the endpoint's prices" in together


def test_what_could_not_be_read_is_told_of_every_run(tasks, tmp_path):
    run = iclperm.run(transfer(tasks), tmp_path / "run")
    shares = {name: one.generation.by_shots[-1].unparsed for name, one in run.runs.items()}
    assert set(shares) == {"News", "Article"}
    assert all(share > 0 for share in shares.values())
    run.write_report()
    content = json.loads((tmp_path / "run" / "report.json").read_text())
    assert {name: about["generation"]["by_shots"][-1]["unparsed"] for name, about in content["runs"].items()} == shares
    done = CliRunner().invoke(cli.cli, ["report", str(tmp_path / "run")], standalone_mode=False)
    assert done.exception is None
    for name, share in shares.items():
        assert f"{name}: Generated answers" in done.stdout
        told = " ".join(done.stdout.split("Conclusion")[1].split())
        assert f"{name}: Answers are generated: at k = 3 {share:.1%} of the texts" in told


def test_what_could_not_be_read_on_dev_is_told_too(tasks, tmp_path):
    study = Study(kind="search", task=tasks[0], **SIZES)
    run = iclperm.run(study, tmp_path / "run")
    dev = run.splits["dev"]
    share = np.average((dev.generated.state[dev.context_of] == UNPARSED).mean(axis=(0, 1, 2)), weights=dev.weights)
    found = findings(run)
    assert found.dev.by_shots[-1].unparsed == pytest.approx(share)
    assert f"(on dev {share:.1%})" in found.conclusion()[0]
    all_read = replace(found, by_shots=(found.by_shots[-1]._replace(unparsed=0.0),))
    assert f"0.0% of the texts (on dev {share:.1%})" in all_read.conclusion()[0]
    assert [table.title for table in found.tables(True)][-1].endswith("dev queries")
    assert run.report_content()["generation"]["dev"]["by_shots"]
    dropped = iclperm.open_run(tmp_path / "run", unparsed="drop").generation
    assert share > 0.05
    assert any(warning.startswith("on dev: ") for warning in dropped.warnings)
    without = iclperm.run(Study(task=tasks[0], **{**SIZES, "dev_queries": 0})).generation
    assert without.dev is None
    assert "on dev" not in without.conclusion()[0]


def test_a_selection_of_open_answers_counts_no_labels(tasks, tmp_path):
    sizes = {**SIZES, "permutations": 3, "queries": 4, "dev_queries": 4, "shots": 3}
    run = iclperm.run(Study(kind="selection", task=tasks[0], select=2, **sizes), tmp_path / "run")
    assert np.isnan(run.choice.num_labels).all()
    content = run.report_content()
    assert set(content["runs"]) == {"source", "chosen"}
    assert content["runs"]["source"]["generation"]["dev"] is not None


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"criterion": "local_entropy"}, "News: criterion is 'local_entropy', but open answers have no labels"),
        ({"criterion": "global_entropy"}, "News: criterion is 'global_entropy', .*choose dev_accuracy or majority"),
        (
            {"tasks": ["mini_news"], "scoring": "generate", "criterion": "dev_log_likelihood"},
            "mini_news: criterion is 'dev_log_likelihood', but generated answers have no label scores",
        ),
        ({"tasks": ["mini_news"], "max_new_tokens": 4}, "mini_news: max_new_tokens is for generated answers"),
    ],
)
def test_what_would_fail_after_the_work_is_refused_before(choices, words, tasks, monkeypatch):
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)
    more = {key: value for key, value in choices.items() if key != "tasks"}
    named = [tasks[0], *choices.get("tasks", tasks[1:])]
    named = named[::-1] if more.get("scoring") else named
    for begin in (iclperm.run, iclperm.plan):
        with pytest.raises(ConfigError, match=words) as refused:
            begin(transfer(named, **more))
        assert "\n" not in str(refused.value)


def test_one_search_is_refused_alike_and_labels_that_are_written_can_be_counted(tasks):
    with pytest.raises(ConfigError, match="choose dev_accuracy or majority_agreement"):
        iclperm.plan(Study(kind="search", task=tasks[0], criterion="global_entropy", **SIZES))
    choices = {**SIZES, "queries": 4, "dev_queries": 4, "scoring": "generate", "max_new_tokens": 1}
    run = iclperm.run(Study(kind="search", criterion="global_entropy", **choices))
    assert "global_entropy" in [criterion.name for criterion in run.findings().criteria]
