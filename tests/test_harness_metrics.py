"""Files of lm-evaluation-harness run here and there, on the same rows and texts: equal metrics, row by row."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml
from faulty_server import faulty_server
from tolerances import TOLERANCES

import iclperm
from iclperm import Study, demo

lm_eval = pytest.importorskip("lm_eval")
THEIRS = Path(str(find_spec("lm_eval").origin)).parent / "tasks"
PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
HEADLINES = {
    split: [json.loads(line) for line in (demo.data_path() / f"{split}.jsonl").read_text("utf-8").splitlines()[:14]]
    for split in ("train", "test")
}
NAMES = ["none", "first", "samples"]
MEASURED = {"acc": "sum", "acc_norm": "characters", "acc_bytes": "bytes", "acc_mutual_info": "pmi"}
SAMPLES = [{"goal": f"Open {thing}", "sol1": f"Pull the {thing}.", "sol2": "Sing to it, long and loud.", "label": at}
           for at, thing in enumerate(["a jar", "the window"])]  # fmt: skip


def piqa_rows(split):
    """Rows in PIQA's columns: which of two topics a headline has, either by its word or by more words."""
    topics = sorted({row["label"] for row in HEADLINES[split]})
    rows = []
    for number, row in enumerate(HEADLINES[split]):
        other = topics[(topics.index(row["label"]) + 1 + number % (len(topics) - 1)) % len(topics)]
        right, wrong = row["label"], other
        if number % 3:
            right, wrong = (right, f"{wrong} news") if number % 3 == 1 else (f"{right} as ever", wrong)
        sols = [right, wrong] if number % 2 else [wrong, right]
        goal = " ".join(row["text"].split()[:4])
        rows.append({"goal": goal, "sol1": sols[0], "sol2": sols[1], "label": sols.index(right)})
    return rows


def maths_rows(first, count):
    """Rows in GSM8K's columns."""
    return [
        {"question": f"Ann has {n} pears and buys {n + 993}. How many has she?",
         "answer": f"{n} and {n + 993} are <<{n}+{n + 993}={2 * n + 993}>>{2 * n + 993}.\n#### {2 * n + 993:,}"}
        for n in range(first, first + count)
    ]  # fmt: skip


def said(prompt):
    """What the scripted model writes after a prompt: of eight ways to answer, some are read by one pipeline alone."""
    asked = prompt.rsplit("Question: ", 1)[1]
    n = int(asked.split()[2])
    right = 2 * n + 993
    ways = (
        f" She has {right}.\n#### {right}",
        f" The answer is {right}.",
        f" #### {right:,}\nThat is more than {n}.",
        f" #### {n}",
        f" It costs $ {right}.00",
        " I do not know.",
        f" ####{right}",
        f" {n} pears, so #### ${right:,} in all, {n} of them old",
    )
    return ways[n % len(ways)]


def harness_file(folder, name, rows, **keys):
    """A task file on rows of one's own, which are written beside it."""
    files = {}
    for split, found in rows.items():
        files[split] = str(folder / f"{name}-{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    own = {"task": f"local_{name}", "dataset_path": "json", "dataset_name": None}
    loading = {"data_files": files, "cache_dir": str(folder / "cache")}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**keys, **own, "dataset_kwargs": loading}, sort_keys=False))
    return path


def evaluated(model, folder, *names, **arguments):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model=model,
        tasks=[f"local_{name}" for name in names],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **arguments,
    )


def by_prompt(found, name, pipeline="none"):
    """The harness' samples of a task by their prompt."""
    samples = [sample for sample in found["samples"][f"local_{name}"] if sample["filter"] == pipeline]
    return {sample["arguments"][0][0]: sample for sample in samples}


def order_taken(study, prompts):
    """The one permutation whose prompts are the harness' own, and these by our queries."""
    ours = {}
    for permutation in range(2 if study.shots else 1):
        cell = {"index_set": 0, "permutation": permutation, "shots": study.shots}
        texts = [iclperm.sample_prompt(study, **cell, query=query).text for query in range(len(prompts))]
        if set(texts) == set(prompts):
            ours[permutation] = texts
    ((permutation, texts),) = ours.items()
    return permutation, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def chosen(folder):
    """What `hf` says of PIQA's own file with no demonstrations, with the first of train, and with those of the file."""
    rows = {"train": piqa_rows("train"), "validation": piqa_rows("test")}
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in MEASURED]
    shared = {"include": str(THEIRS / "piqa" / "piqa.yaml"), "metric_list": metrics}
    first = {"num_fewshot": 2, "fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    own = {"num_fewshot": 2, "fewshot_config": {"sampler": "first_n", "samples": SAMPLES}}
    for name, keys in {"none": {"num_fewshot": 0}, "first": first, "samples": own}.items():
        harness_file(folder, name, rows, **shared, **keys)
    arguments = {"pretrained": str(demo.model_path()), "device": "cpu", "dtype": "float32", "logits_cache": False}
    return evaluated("hf", folder, "none", "first", "samples", model_args=arguments)


@pytest.mark.filterwarnings("ignore")  # the harness's own, and those of what it imports
@pytest.mark.parametrize("name", NAMES)
def test_choices_by_columns_have_the_accuracies_of_hf(chosen, name, folder, tmp_path):
    theirs, own = by_prompt(chosen, name), {"demonstrations": [[0, 1]], "permutations": 2, "shots": 2}
    sizes = {"sets": 1, "permutations": 1, "shots": 0} if name == "none" else own
    study = Study(task=str(folder / f"{name}.yaml"), queries=14, normalize="pmi", **sizes)
    iclperm.run(study, out=tmp_path / "run")
    permutation, prompts = order_taken(study, theirs)
    accuracies = set()
    for metric, normalize in MEASURED.items():
        found = iclperm.open_run(tmp_path / "run", normalize=normalize)
        for query, prompt in enumerate(prompts):
            sample = theirs[prompt]
            scores = np.array([float(answer[0][0]) for answer in sample["resps"]])
            lengths = [len(str(arguments[1])) for arguments in sample["arguments"]]
            own = [found.label_logprob[0, permutation, 0, query], found.splits["test"].alone[query]]
            assert (np.abs(np.concatenate(own) - scores) / lengths).max() < PER_TOKEN
            assert found.correct[0, permutation, 0, query] == sample[metric]
        accuracies.add(accuracy := chosen["results"][f"local_{name}"][f"{metric},none"])
        assert found.correct[0, permutation, 0].mean() == pytest.approx(accuracy)
    assert accuracies - {0, 1}


def test_the_lengths_of_choices_tell(chosen):
    """Or equal metrics would say little."""
    found = [[chosen["results"][f"local_{name}"][f"{metric},none"] for metric in MEASURED] for name in NAMES]
    assert any(len(set(accuracies)) > 1 for accuracies in found)


@pytest.mark.filterwarnings("ignore")
def test_pipelines_of_gsm8k_have_the_exact_match_of_the_harness(folder, monkeypatch, tmp_path):
    """GSM8K's own file on made-up rows, and two models that write the same texts."""
    from lm_eval.api.model import LM

    class Scripted(LM):
        def generate_until(self, requests, disable_tqdm=False):
            return [said(request.args[0]) for request in requests]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError

    rows = {"train": maths_rows(1, 4), "test": maths_rows(10, 16)}
    path = harness_file(
        folder, "maths", rows, include=str(THEIRS / "gsm8k" / "gsm8k.yaml"), num_fewshot=2,
        fewshot_split="train", fewshot_config={"sampler": "first_n"},
    )  # fmt: skip
    found = evaluated(Scripted(), folder, "maths")
    monkeypatch.setattr("faulty_server.answer_to", said)
    accuracies = {}
    with faulty_server() as server:
        behind = {"base_url": server.url, "model": server.model, "api": "completions"}
        for pipeline in ("strict-match", "flexible-extract"):
            study = Study(
                task=f"{path}:{pipeline}", endpoint=behind, demonstrations=[[0, 1]], permutations=2, shots=2, queries=16
            )
            run = iclperm.run(study, out=tmp_path / pipeline)
            theirs = by_prompt(found, "maths", pipeline)
            permutation, prompts = order_taken(study, theirs)
            for query, prompt in enumerate(prompts):
                assert run.correct[0, permutation, 0, query] == theirs[prompt]["exact_match"], prompt
            accuracies[pipeline] = found["results"]["local_maths"][f"exact_match,{pipeline}"]
            assert run.correct[0, permutation, 0].mean() == pytest.approx(accuracies[pipeline])
    assert 0 < accuracies["strict-match"] < accuracies["flexible-extract"] < 1
