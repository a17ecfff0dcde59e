"""Manifests of ``qsync launch`` have no field that JobSet or Kubernetes does not know; what looks at them refuses those."""

from __future__ import annotations

import sys

import pytest
import yaml

from contracts.environment import ROOT

sys.path.insert(0, str(ROOT / "bench"))

from journey.manifests import closed, rows

DEFINITION = {
    "type": "object",
    "properties": {
        "replicas": {"type": "integer"},
        "port": {"x-kubernetes-int-or-string": True},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {"spec": {"type": "object"}}},
        "groups": {"type": "array", "items": {"type": "object", "properties": {"properties": {"type": "string"}}}},
    },
}


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"replicas": 1, "port": "http", "labels": {"a": "b"}, "template": {"any": 1}, "groups": [{"properties": "p"}]}, True),
        ({"port": 80}, True),
        ({"replica": 1}, False),
        ({"labels": {"a": 1}}, False),
        ({"groups": [{"unknown": "a"}]}, False),
        ({"port": []}, False),
    ],
)
def test_a_definition_is_closed_where_it_names_fields(value, valid):
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    assert jsonschema.Draft202012Validator(closed(DEFINITION)).is_valid(value) == valid


@pytest.mark.nightly
def test_every_jobset_is_valid_and_a_definition_that_lacks_a_field_refuses_it(tmp_path):
    pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate kubeflow-trainer-api")
    pytest.importorskip("kubeflow_trainer_api", reason="pip install kubernetes-validate kubeflow-trainer-api")
    found = {row["id"]: row["value"] for row in rows(None)}
    assert found == {"W7": "12 of 12"}
    schema = {"type": "object", "properties": {name: {} for name in ("apiVersion", "kind", "metadata")}}
    versions = [{"name": "v1alpha2", "storage": True, "schema": {"openAPIV3Schema": schema}}]
    spec = {"group": "jobset.x-k8s.io", "names": {"kind": "JobSet"}, "versions": versions}
    definition = {"kind": "CustomResourceDefinition", "metadata": {"name": "jobsets.jobset.x-k8s.io"}, "spec": spec}
    (tmp_path / "jobsets.yaml").write_text(yaml.safe_dump(definition))
    assert {row["id"]: row["value"] for row in rows(tmp_path)} == {"W7": "0 of 12"}
