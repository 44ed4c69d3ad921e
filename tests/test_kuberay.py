"""docs/kuberay.yaml says what iclperm needs; `benchmarks/kuberay_schema.py` holds it against a published schema."""

import importlib
import shlex
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from test_docs import ROOT, check_call

MANIFEST = yaml.safe_load((ROOT / "docs/kuberay.yaml").read_text(encoding="utf-8"))
CLUSTER = MANIFEST["spec"]["rayClusterSpec"]
(GROUP,) = CLUSTER["workerGroupSpecs"]


def pod(group):
    (container,) = group["template"]["spec"]["containers"]
    return container, {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_it_runs_a_command_of_ours_in_a_cluster():
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("ray.io/v1", "RayJob")
    program, *arguments = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert (program, arguments[0], arguments[-1]) == ("iclperm", "run", "--ray")
    check_call(arguments)
    folder = Path(arguments[arguments.index("--out") + 1])
    assert any(folder.is_relative_to(mount["mountPath"]) for mount in pod(CLUSTER["headGroupSpec"])[0]["volumeMounts"])


def test_it_names_a_ray_that_we_run_on():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert Version(CLUSTER["rayVersion"]) in Requirement(extras["ray"][0]).specifier


def test_a_worker_has_a_gpu_and_what_the_driver_has():
    (driver, of_driver), (worker, of_worker) = pod(CLUSTER["headGroupSpec"]), pod(GROUP)
    assert driver["image"] == worker["image"]  # the same iclperm, Python and Ray
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    threads = {each["name"]: each["value"] for each in driver["env"]}["OMP_NUM_THREADS"]
    assert worker["resources"]["limits"]["cpu"] == threads  # a worker asks Ray for as many
    assert GROUP["replicas"] == GROUP["minReplicas"] == GROUP["maxReplicas"]
    for container, volumes in ((driver, of_driver), (worker, of_worker)):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert "/models" in {mount["mountPath"] for mount in container["volumeMounts"]}


CONTAINER = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "cpu": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
CRD = {
    "metadata": {"name": "things.example.org"},
    "spec": {
        "group": "example.org",
        "names": {"kind": "Thing"},
        "versions": [
            {"name": "v1", "served": True, "schema": {"openAPIV3Schema": {"properties": {"spec": CONTAINER}}}},
            {"name": "v0", "served": False, "schema": {"openAPIV3Schema": {"properties": {"spec": {}}}}},
        ],
    },
}
VALID = {"apiVersion": "example.org/v1", "kind": "Thing", "spec": {"name": "a", "cpu": "4", "labels": {"any": "b"}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: None, None),
        (lambda given: given["spec"].update(cpu=4), None),
        (lambda given: given["spec"].update(cpu=[]), "spec.cpu: [] is not of type 'integer', 'string'"),
        (lambda given: given["spec"].pop("name"), "spec.: 'name' is a required property"),
        (lambda given: given["spec"].update(nmae="b"), "'nmae' was unexpected"),
        (lambda given: given.update(kind="Other"), "Other of example.org is not Thing of example.org"),
        (lambda given: given.update(apiVersion="example.org/v0"), "version v0 is not among ['v1']"),
    ],
)
def test_what_a_schema_forbids_is_found(monkeypatch, change, words):
    pytest.importorskip("jsonschema")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    given = deepcopy(VALID)
    change(given)
    found = importlib.import_module("kuberay_schema").problems(given, CRD)
    assert [words in each for each in found] == [True] if words else found == []
