"""docs/kuberay.yaml against the published schema of KubeRay's RayJob: ``python benchmarks/kuberay_schema.py CRD``.

CRD is ``ray-operator/config/crd/bases/ray.io_rayjobs.yaml`` of https://github.com/ray-project/kuberay. A key that the
schema does not name fails, too, as ``kubectl apply --validate=strict`` has it; `jsonschema` comes with Ray.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).resolve().parents[1] / "docs" / "kuberay.yaml"


def strict(schema: Any) -> Any:
    """A schema of Kubernetes as JSON Schema that takes no other keys than it names."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        made["type"] = ["integer", "string"]
        made.pop("anyOf", None)
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") is True or "additionalProperties" in schema
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict) and not is_open:
        made["additionalProperties"] = False
    return made


def problems(manifest: dict[str, Any], crd: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest by the definition of its kind, its metadata left out."""
    from jsonschema import Draft202012Validator

    (group, _, version), names = manifest["apiVersion"].partition("/"), crd["spec"]["names"]
    if (group, manifest["kind"]) != (crd["spec"]["group"], names["kind"]):
        return [f"{manifest['kind']} of {group} is not {names['kind']} of {crd['spec']['group']}"]
    schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["served"]}
    if version not in schemas:
        return [f"version {version} is not among {sorted(schemas)}"]
    found = Draft202012Validator(strict(schemas[version]["properties"]["spec"])).iter_errors(manifest["spec"])
    return [f"spec.{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("crd", type=Path)
    crd = yaml.safe_load(parser.parse_args().crd.read_text())
    if found := problems(yaml.safe_load(MANIFEST.read_text()), crd):
        raise SystemExit("\n".join(found))
    print(f"{MANIFEST.name} is valid by {crd['spec']['names']['kind']} of {crd['metadata']['name']}")


if __name__ == "__main__":
    main()
